"""The error codes of items, targets and runs: the meaning of each, and what an operator can do. The page `/docs/errors`
and docs/errors.md are made from this table; a test compares it with the codes in the source."""

from __future__ import annotations

from typing import NamedTuple

# An item fails with the code of its last execution.
RETRIED = (
    "The call is retried with backoff. If the item has failed with it, check the vendor, then redrive the run or retry "
    "its failed targets."
)
SLOWER = (
    "The call is retried with backoff, which uses up executions. If the item has failed with it, lower the caps of the "
    "lane (`ecluse lanes cap`) or its connection, then redrive the run or retry its failed targets."
)
REGISTER = "The call is retried with backoff. If the source has failed with it, refresh the company later."
MAIL_SERVER = "The mail is retried for a day. If it has failed, check the mail server, then redeliver."
REDRIVE = "Redrive the run."


class Failure(NamedTuple):
    """The meaning of an error code, and what an operator can do."""

    meaning: str
    remedy: str


FAILURES = {
    # The engine
    "BUG": Failure(
        "Code of the flow raised an unexpected error.", "Report the error text: it has the class and the message."
    ),
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
    "NO_WORKFLOW": Failure(
        "The run's stored workflow state is missing.", "Start a new run, and report the problem with the run id."
    ),
    "RUN_ENDED": Failure("The run ended before the item was finished.", REDRIVE),
    "STALE": Failure(
        "The run took longer than its stages may and was ended.", "Find out why the run waited, then redrive it."
    ),
    "STALLED": Failure("The recording made no progress for longer than allowed.", REDRIVE),
    "STOPPED": Failure("The flow stopped the run, so the fiche was not processed.", "Read the error of the run."),
    "NOT_NAMED": Failure(
        "The vendor answered a write of several records without naming this one.",
        "Nothing: the record is read back, and written again if the write was not applied.",
    ),
    "STORE_FAILED": Failure(
        "The result could not be stored.", "Read the error text: it has the reason that the database gave."
    ),
    "WORKER_CRASHED": Failure(
        "The workers that executed the item died, so it is not tried again.",
        "Find the cause in the logs of these workers, then redrive the run.",
    ),
    # Writes
    "CONFLICT": Failure(
        "The vendor's record is neither as wanted nor as before: another party has changed it.",
        "Compare the record with the wanted one, then start a new run.",
    ),
    "NOT_APPLIED": Failure("The write was sent and found not applied.", REDRIVE),
    "NOT_AS_WANTED": Failure("The vendor stored another value than the one sent.", "Check the vendor's record."),
    "OUTCOME_UNKNOWN": Failure(
        "The vendor may have applied the write, and its state cannot be read.",
        "Check the record at the vendor before you repeat the write.",
    ),
    "PRECONDITION_FAILED": Failure("The vendor's record has changed since it was read.", "Start a new run."),
    # Calls to vendors
    "ANSWER_TOO_LARGE": Failure(
        "The vendor's answer is larger than allowed.", "Check the size of the vendor's answer for this record."
    ),
    "BAD_ANSWER": Failure("The vendor's answer is not as documented.", RETRIED),
    "FORBIDDEN": Failure("The vendor refused with 403.", "Check what the vendor's key may do."),
    "FORBIDDEN_URL": Failure(
        "The URL leads to an address that must not be called.", "Correct the URL, or allow the network."
    ),
    "NO_CONNECTION": Failure(
        "The tenant has no connection to the vendor.", "Add it: `ecluse connections create`; then redrive the run."
    ),
    "NO_KEY": Failure(
        "The key of the connection, or the schedule's own key, was deleted.",
        "Set the key again, then redrive the run.",
    ),
    "SEALED": Failure(
        "The key of the connection is encrypted, and the server has no secret key to decrypt it.",
        "Set ECLUSE_SECRET_KEY.",
    ),
    "NOT_CONFIGURED": Failure("The vendor is not configured.", "Set the settings that the error names, then redrive."),
    "NOT_FOUND": Failure("The vendor does not know the record.", "Check the record's id."),
    "QUOTA_EXCEEDED": Failure(
        "The quota of the vendor's account is used up.", "Raise the quota, then redrive the run."
    ),
    "THROTTLED": Failure("The vendor answered 429: too many requests.", SLOWER),
    "CONCURRENCY": Failure("Too many requests at a time for the plan of the vendor's account.", SLOWER),
    "TIMEOUT": Failure("No answer came within the time limit.", RETRIED),
    "UNAUTHORIZED": Failure("The vendor refused with 401.", "Check the vendor's key."),
    "VENDOR_DISCONNECTED": Failure("The connection was lost before the answer was complete.", RETRIED),
    "VENDOR_ERROR": Failure("A call to the vendor failed.", "Read the error text of the item."),
    "VENDOR_ERROR_*": Failure("The vendor answered with this HTTP status.", RETRIED),
    "VENDOR_REDIRECT": Failure("The vendor answered with a redirect, which is not followed.", "Correct its address."),
    "VENDOR_REFUSED": Failure("The vendor refused the request.", "Read the error text: it quotes the vendor."),
    "VENDOR_UNAVAILABLE": Failure("The vendor is unavailable.", RETRIED),
    "VENDOR_UNREACHABLE": Failure("No connection to the vendor could be made; nothing was sent.", RETRIED),
    # Fiches and their selection
    "CRM_UNAVAILABLE": Failure(
        "The CRM could not be asked for the fiches of any day.", "Check the CRM, then trigger the schedule again."
    ),
    "CRM_UNSUCCESSFUL": Failure("The CRM answered that the request was not successful.", RETRIED),
    "DETAILS_NOT_FETCHED": Failure(
        "The details of the fiche could not be fetched; the reason has the CRM's answer.",
        f"After 401 or 403, correct the key of the connection first. {REDRIVE}",
    ),
    "GROUPE": Failure("The groupe of the fiche is not among those selected.", "Nothing, or change the selection."),
    "NO_AUDIT_CONFIGS": Failure("The automation has no active audit config.", "Create or activate one, then redrive."),
    "NO_RECORDINGS": Failure("The fiche has no recordings, and only fiches with some are selected.", "Nothing."),
    "NO_SCHEDULE": Failure("The schedule of the run does not exist any more.", "Create a schedule and trigger that."),
    "TOO_MANY_RECORDINGS": Failure("The fiche has more recordings than the selection allows.", "Raise the limit."),
    # Transcriptions and audits
    "AUDIO_UNAVAILABLE": Failure(
        "Ecluse could not download the recording; the vendor was not called.",
        "The download is retried with backoff. If the item has failed with it, check the server of the recordings, "
        "then redrive the run.",
    ),
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
    "TRANSCRIPT_TOO_LONG": Failure(
        "The transcripts are longer than an audit accepts.", "Use a model with a larger context, and raise the limit."
    ),
    "TRUNCATED": Failure("The model's answer was cut off at its maximum length.", RETRIED),
    # Shops
    "ACCESS_DENIED": Failure("The access token lacks a scope.", "Give the token write_products, or give another one."),
    "CURRENCY_MISMATCH": Failure("A price is in another currency than the project.", "Connect the shop again."),
    "INTERNAL_SERVER_ERROR": Failure(
        "The shop answered with an internal error; the price is read back to find out whether it was applied.",
        "The price is retried with backoff. If the target has failed with it, retry the failed targets.",
    ),
    "NOT_ATTEMPTED": Failure("The price was never sent: the run ended before.", "Retry the failed targets."),
    "SHOP_FROZEN": Failure(
        "The shop is frozen until its bill is paid.", "Pay the bill, then retry the failed targets."
    ),
    "SHOP_LOCKED": Failure("The shop is locked.", "Ask its vendor to unlock it, then retry the failed targets."),
    "SHOP_NOT_FOUND": Failure("There is no shop at this address.", "Correct the base_url of the project."),
    "NO_PROJECT": Failure("The project of the rule run was deleted.", "Connect the shop again, then preview the rule."),
    "PRICE_CONFLICT": Failure(
        "The price in the shop is neither the former nor the new one: another party has changed it.",
        "Compare the two prices, then preview the rule again.",
    ),
    "TARGET_TIMEOUT": Failure("The price was not applied within the time of a target.", "Retry the failed targets."),
    # Registers of companies
    "CORE_IDENTITY_MISSING": Failure(
        "The register's answer lacks the company's name or number.", "Refresh the company later."
    ),
    "INVALID_RESPONSE": Failure("The register's answer is not as documented.", "Refresh the company later."),
    "NETWORK_ERROR": Failure("No connection to the register could be made.", REGISTER),
    "RATE_LIMIT": Failure("The register answered: too many requests.", REGISTER),
    "SERVER_ERROR": Failure("The register failed.", REGISTER),
    "UNKNOWN": Failure(
        "A call to the register failed for a reason without a code of its own.",
        "Read the error text of the source, then refresh the company.",
    ),
    # Jobs
    "NO_AGENT": Failure("No agent of the host claimed the job in time.", "Start the agent, then retry the job."),
    # Notifications
    "ENDPOINT_OFF": Failure("The endpoint was deleted or switched off.", "Switch it on, then redeliver."),
    "GONE": Failure(
        "The receiver answered 410, and the endpoint was switched off.", "Correct the URL, then switch the endpoint on."
    ),
    "MAIL_DEFERRED": Failure("The mail server asked to try later.", MAIL_SERVER),
    "MAIL_LIMIT": Failure(
        "The tenant has used up its mails of the day.", "Raise ECLUSE_MAILS_PER_DAY, or subscribe to fewer events."
    ),
    "MAIL_NOT_CONFIGURED": Failure(
        "The server is not set up to send mail.", "Set SMTP_HOST, MAIL_FROM and ECLUSE_PUBLIC_URL."
    ),
    "MAIL_REFUSED": Failure("The mail server refused the mail.", "Correct the address that the error names."),
    "MAIL_SERVER": Failure("The mail server could not be used; nothing was sent.", MAIL_SERVER),
    "MAY_HAVE_BEEN_SENT": Failure(
        "The mail may have been sent, so it is not repeated.", "Redeliver the event if the mail did not arrive."
    ),
    "NOT_CONFIRMED": Failure(
        "The mail address is not confirmed.", "Follow the link sent to it, or ask for a new link; then redeliver."
    ),
    "NO_DELIVERY": Failure("The run has no message to deliver.", "Nothing: deliveries are started by events only."),
    "NO_SECRET": Failure(
        "The URL or signing secret of the webhook was deleted.",
        "Set the URL again or rotate the secret, then redeliver.",
    ),
    "NO_SECRET_KEY": Failure("The server has no secret key to decrypt the signing secret.", "Set ECLUSE_SECRET_KEY."),
}
