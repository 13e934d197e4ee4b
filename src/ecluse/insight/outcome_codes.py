"""The error codes of items, targets and runs: the meaning of each, and what an operator can do. The page `/docs/errors`
and docs/errors.md are made from this table; a test compares it with the codes in the source."""

from __future__ import annotations

from typing import NamedTuple

RETRIED = "Nothing: it is retried with growing pauses. If it stays, look at the vendor and at its lane."
REDRIVE = "Redrive the run."


class Failure(NamedTuple):
    meaning: str
    remedy: str


FAILURES = {
    # The engine
    "BUG": Failure("Code of the flow raised an unexpected error.", "Report it: the error names its class and message."),
    "BUDGET_EXCEEDED": Failure(
        "A budget had no room for the paid call until the time of the stage was up.",
        "Raise the budget, or wait for its next period; then redrive the run.",
    ),
    "CANCELLED": Failure("The run was ended on request before the target was finished.", "Redrive cancelled targets."),
    "DISPATCH_FAILED": Failure(
        "The item could not be stored as it is.", "Correct the record: the error names what cannot be stored."
    ),
    "INCOMPLETE": Failure("The time of the stage was up before the item was finished.", REDRIVE),
    "INTERRUPTED": Failure(
        "The server stopped while a paid call was in flight.", "Nothing: the call is repeated, and may be paid twice."
    ),
    "LEASE_LOST": Failure(
        "The lease was taken by another holder, so nothing was written.", "Nothing: the new holder does the work."
    ),
    "NON_RETRIABLE": Failure("The flow ended the run at once.", "Correct what the error of the run names."),
    "NOT_DISPATCHED": Failure("The run ended before the audit was dispatched.", REDRIVE),
    "NOT_PROCESSED": Failure("The run ended without any work for the target.", REDRIVE),
    "NO_WORKFLOW": Failure("The durable workflow of the run is lost.", "Start the run again, and report it."),
    "RUN_ENDED": Failure("The run ended before the item was finished.", REDRIVE),
    "STALE": Failure("The run took longer than its stages may and was ended.", "Look why it waited, then redrive it."),
    "STALLED": Failure("The recording made no progress for longer than allowed.", REDRIVE),
    "STOPPED": Failure("The flow stopped the run, so the fiche was not processed.", "Look at the error of the run."),
    "NOT_NAMED": Failure(
        "The vendor answered a write of several records without naming this one.",
        "Nothing: the record is read back, and written again if the write was not applied.",
    ),
    "STORE_FAILED": Failure("The result could not be stored.", "Look at the error: the database names the reason."),
    "WORKER_CRASHED": Failure(
        "The workers that executed the item died, so it is not tried again.",
        "Look for the cause, then redrive the run.",
    ),
    # Writes
    "CONFLICT": Failure(
        "The vendor's record is neither as wanted nor as before: another party has changed it.",
        "Compare the two, then start again.",
    ),
    "NOT_APPLIED": Failure("The write was sent and found not applied.", REDRIVE),
    "NOT_AS_WANTED": Failure("The vendor stored another value than the one sent.", "Look at the vendor's record."),
    "OUTCOME_UNKNOWN": Failure(
        "The vendor may have applied the write and cannot be asked.", "Look at the vendor before you repeat it."
    ),
    "PRECONDITION_FAILED": Failure("The vendor's record has changed since it was read.", "Start again."),
    # Calls to vendors
    "ANSWER_TOO_LARGE": Failure("The vendor's answer is larger than allowed.", "Look at what the vendor sends."),
    "BAD_ANSWER": Failure("The vendor's answer is not as documented.", RETRIED),
    "FORBIDDEN": Failure("The vendor refused with 403.", "Check what the vendor's key may do."),
    "FORBIDDEN_URL": Failure(
        "The URL leads to an address that must not be called.", "Correct the URL, or allow the network."
    ),
    "NO_CONNECTION": Failure(
        "The tenant has no connection to the vendor.", "Add it: `ecluse connections create`; then redrive the run."
    ),
    "NO_KEY": Failure(
        "The key of the connection, or the schedule's own, is gone.", "Set it anew, then redrive the run."
    ),
    "SEALED": Failure("The key of the connection is sealed, and the server has no key.", "Set ECLUSE_SECRET_KEY."),
    "NOT_CONFIGURED": Failure("The vendor is not configured.", "Set the settings that the error names, then redrive."),
    "NOT_FOUND": Failure("The vendor does not know the record.", "Check the record's id."),
    "QUOTA_EXCEEDED": Failure(
        "The quota of the vendor's account is used up.", "Raise the quota, then redrive the run."
    ),
    "THROTTLED": Failure("The vendor answered 429: too many requests.", RETRIED),
    "CONCURRENCY": Failure("Too many requests at a time for the plan of the vendor's account.", RETRIED),
    "TIMEOUT": Failure("No answer came within the time limit.", RETRIED),
    "UNAUTHORIZED": Failure("The vendor refused with 401.", "Check the vendor's key."),
    "VENDOR_DISCONNECTED": Failure("The connection was lost before the answer was complete.", RETRIED),
    "VENDOR_ERROR": Failure("A call to the vendor failed.", "Look at the error."),
    "VENDOR_ERROR_*": Failure("The vendor answered with this HTTP status.", RETRIED),
    "VENDOR_REDIRECT": Failure("The vendor answered with a redirect, which is not followed.", "Correct its address."),
    "VENDOR_REFUSED": Failure("The vendor refused the request.", "Look at the error: it quotes the vendor."),
    "VENDOR_UNAVAILABLE": Failure("The vendor is unavailable.", RETRIED),
    "VENDOR_UNREACHABLE": Failure("No connection to the vendor could be made; nothing was sent.", RETRIED),
    # Fiches and their selection
    "CRM_UNAVAILABLE": Failure("The CRM could not be asked for the fiches of any day.", "Check the CRM, then trigger."),
    "CRM_UNSUCCESSFUL": Failure("The CRM answered that it was not successful.", RETRIED),
    "DETAILS_NOT_FETCHED": Failure("The details of the fiche could not be fetched.", REDRIVE),
    "GROUPE": Failure("The groupe of the fiche is not among those selected.", "Nothing, or change the selection."),
    "NO_AUDIT_CONFIGS": Failure("The automation has no active audit config.", "Create or activate one, then redrive."),
    "NO_RECORDINGS": Failure("The fiche has no recordings, and only fiches with some are selected.", "Nothing."),
    "NO_SCHEDULE": Failure("The schedule of the run does not exist any more.", "Create a schedule and trigger that."),
    "TOO_MANY_RECORDINGS": Failure("The fiche has more recordings than the selection allows.", "Raise the limit."),
    # Transcriptions and audits
    "AUDIO_UNAVAILABLE": Failure("The provider could not download the recording.", RETRIED),
    "CONTENT_FILTERED": Failure("The filter of the model's vendor withheld the answer.", "Change the config's texts."),
    "EMPTY_ANSWER": Failure("The model's answer is empty.", RETRIED),
    "INPUT_TOO_LONG": Failure("The input is too long for the model.", "Use a model with a larger context."),
    "MODEL_NOT_FOUND": Failure("The vendor does not know the model.", "Correct the config's model or LLM_MODEL."),
    "NO_TRANSCRIPT": Failure("The fiche has no transcript to audit.", "Transcribe the fiche first."),
    "NO_URL": Failure("The CRM has no URL for the recording.", "Correct it in the CRM, then redrive the run."),
    "RECORDING_MISSING": Failure("The recording was removed in the meantime.", "Nothing."),
    "REFUSED": Failure("The model refused to answer.", "Change the config's texts."),
    "SCHEMA_BROKEN": Failure("The model's answer does not have the form asked for.", RETRIED),
    "TRANSCRIPTION_INCOMPLETE": Failure("Not all recordings were transcribed in time.", REDRIVE),
    "TRANSCRIPT_TOO_LONG": Failure("The transcripts are longer than an audit takes.", "Use a larger model and limit."),
    "TRUNCATED": Failure("The model's answer was cut off at its longest.", RETRIED),
    # Shops
    "ACCESS_DENIED": Failure("The access token lacks a scope.", "Give the token write_products, or give another one."),
    "CURRENCY_MISMATCH": Failure("A price is in another currency than the project.", "Connect the shop anew."),
    "INTERNAL_SERVER_ERROR": Failure("The shop failed; what it did is found out by reading back.", RETRIED),
    "NOT_ATTEMPTED": Failure("The price was never sent: the run ended before.", "Retry the failed targets."),
    "SHOP_FROZEN": Failure("The shop is frozen until its bill is paid.", "Pay it, then retry the failed targets."),
    "SHOP_LOCKED": Failure("The shop is locked.", "Ask its vendor to unlock it, then retry the failed targets."),
    "SHOP_NOT_FOUND": Failure("There is no shop at this address.", "Correct the base_url of the project."),
    "NO_PROJECT": Failure("The project of the rule run was deleted.", "Connect the shop anew, then preview the rule."),
    "PRICE_CONFLICT": Failure(
        "The price in the shop is neither the former nor the new one: another party has changed it.",
        "Compare the two, then preview the rule again.",
    ),
    "TARGET_TIMEOUT": Failure("The price was not applied within the time of a target.", "Retry the failed targets."),
    # Registers of companies
    "CORE_IDENTITY_MISSING": Failure("The register's answer lacks the company's name or number.", "Refresh it later."),
    "INVALID_RESPONSE": Failure("The register's answer is not as documented.", "Refresh the company later."),
    "NETWORK_ERROR": Failure("No connection to the register could be made.", RETRIED),
    "RATE_LIMIT": Failure("The register answered: too many requests.", RETRIED),
    "SERVER_ERROR": Failure("The register failed.", RETRIED),
    "UNKNOWN": Failure("A call to the register failed.", "Look at the error."),
    # Jobs
    "NO_AGENT": Failure("No agent of the host claimed the job in time.", "Start the agent, then retry the job."),
    # Notifications
    "ENDPOINT_OFF": Failure("The endpoint was deleted or switched off.", "Switch it on, then redeliver."),
    "GONE": Failure("The receiver answered 410, and the endpoint was switched off.", "Correct its URL, switch it on."),
    "MAIL_DEFERRED": Failure("The mail server asked to try later.", RETRIED),
    "MAIL_LIMIT": Failure(
        "The tenant has had its mails of the day.", "Raise ECLUSE_MAILS_PER_DAY, or subscribe to less."
    ),
    "MAIL_NOT_CONFIGURED": Failure(
        "The server is not set up to send mail.", "Set SMTP_HOST, MAIL_FROM and ECLUSE_PUBLIC_URL."
    ),
    "MAIL_REFUSED": Failure("The mail server refused the mail.", "Correct the address that the error names."),
    "MAIL_SERVER": Failure("The mail server could not be used; nothing was sent.", RETRIED),
    "MAY_HAVE_BEEN_SENT": Failure(
        "The mail may have been sent, so it is not repeated.", "Redeliver it if it is missing."
    ),
    "NOT_CONFIRMED": Failure(
        "The mail address is not confirmed.", "Follow the link that it was sent, or ask for another one; redeliver."
    ),
    "NO_DELIVERY": Failure("The run has no message to deliver.", "Nothing: deliveries are started by events only."),
    "NO_SECRET": Failure(
        "The URL or signing secret of the webhook is gone.", "Give the URL again, or rotate the secret; redeliver."
    ),
    "NO_SECRET_KEY": Failure("The server has no key to open the signing secret.", "Set ECLUSE_SECRET_KEY."),
}
