"""Every error code that the API answers, with its HTTP status, its meaning and advice for the caller. The OpenAPI
document, problem details (RFC 9457), the page `/docs/errors` and docs/errors.md are made from this table; a test
compares it with the codes in the source."""

from __future__ import annotations

from typing import NamedTuple


class ApiErrorCode(NamedTuple):
    """What an error code of the API means: HTTP status, meaning, and advice for the caller (`remedy`)."""

    status: int
    meaning: str
    remedy: str
    also: int | None = None  # a second status that the code is answered with, required by the Pusher protocol


REFUSALS = {
    # Every route
    "UNAUTHENTICATED": ApiErrorCode(
        401, "The request has no valid API key.", "Send `Authorization: Bearer ecl_…` with a key that is in force."
    ),
    "FORBIDDEN": ApiErrorCode(
        403,
        "The role of the key lacks the permission that the route needs, or the key may not act for this tenant.",
        "Use a key whose role has the permission that the message names.",
    ),
    "SCOPE": ApiErrorCode(
        403, "The scope of the key does not cover the data that the request asks for.", "Use a key of scope ALL."
    ),
    "TENANT_DISABLED": ApiErrorCode(
        403,
        "The tenant of the key, or the one that an administrator would change, is disabled.",
        "Ask an administrator to enable it: `ecluse tenants enable`.",
    ),
    "NOT_FOUND": ApiErrorCode(
        404, "The path, or what it names, does not exist for this tenant.", "Check the path and the ids in it."
    ),
    "METHOD_NOT_ALLOWED": ApiErrorCode(
        405, "The path exists, but not with this HTTP method.", "Use a method that the header Allow names."
    ),
    "INVALID_INPUT": ApiErrorCode(
        422, "A parameter or a field of the body is not as documented.", "Correct the fields that `details` lists."
    ),
    "INTERNAL": ApiErrorCode(
        500, "The server failed unexpectedly.", "Report the `request_id`: the server's log has the reason under it."
    ),
    "DATABASE_AWAY": ApiErrorCode(
        503, "The database is unavailable; nothing was changed.", "Repeat the request after Retry-After seconds."
    ),
    "SERVER_BUSY": ApiErrorCode(
        503,
        "All connections that requests write with are in use, for other tenants too; nothing was changed.",
        "Repeat the request after Retry-After seconds; if it happens often, add a replica with the role api.",
    ),
    "READ_TIMEOUT": ApiErrorCode(
        503, "The read took longer than a request may take.", "Narrow the filters, ask for a smaller page, or retry."
    ),
    "CONNECTION_LIMIT": ApiErrorCode(
        503,
        "The server, or the client's address, has as many open connections as it may have; no request was read.",
        "Reuse connections, or close some; try again.",
    ),
    # Bodies
    "BAD_REQUEST": ApiErrorCode(400, "The request could not be parsed.", "Correct what the message names."),
    "NOT_JSON": ApiErrorCode(400, "The body is not valid JSON.", "Send JSON in UTF-8, without duplicate keys."),
    "BODY_TOO_LARGE": ApiErrorCode(413, "The body has more bytes than allowed.", "Send less at once."),
    "HEAD_TOO_LARGE": ApiErrorCode(
        431, "The request line and headers, or the trailers of a body, are too long.", "Send fewer or shorter headers."
    ),
    "REQUEST_TIMEOUT": ApiErrorCode(
        408, "The body did not arrive in time.", "Send the body at once, or raise ECLUSE_REQUEST_DEADLINE_SECONDS."
    ),
    "UNSUPPORTED_MEDIA_TYPE": ApiErrorCode(
        415, "The Content-Type is not the one that the route takes.", "Send the type that the message names."
    ),
    # Idempotency-Key
    "IN_PROGRESS": ApiErrorCode(
        409, "The first request with this Idempotency-Key is still in progress.", "Repeat it after Retry-After seconds."
    ),
    "IDEMPOTENCY_KEY_REUSED": ApiErrorCode(
        422, "The Idempotency-Key was used for a different request.", "Use a new key for a new request."
    ),
    # States that do not allow the request
    "CONFLICT": ApiErrorCode(409, "The present state does not allow this.", "Read the state again, then decide."),
    "FORBIDDEN_TRANSITION": ApiErrorCode(
        409, "The flow does not allow this change of status.", "Read the run again: its status has changed."
    ),
    "BUDGET_EXCEEDED": ApiErrorCode(
        409,
        "A budget of the tenant or of the schedule has no room for the next call; nothing was started.",
        "Start again when its next period begins, which the message says, or raise the budget.",
    ),
    "BUDGET_BELOW_SPENT": ApiErrorCode(
        409, "The budget is below what is spent already; nothing was changed.", "Set at least what the message says."
    ),
    "ALREADY_ENDED": ApiErrorCode(409, "The run had ended already; nothing was changed.", "Nothing: it is over."),
    "ALREADY_RUNNING": ApiErrorCode(
        409, "Another run is transcribing the fiche.", "Wait for the end of the run that the message names."
    ),
    "ENROLMENT_REFUSED": ApiErrorCode(
        401,
        "The enrolment token of an agent is unknown, expired or used.",
        "Make a new token: `ecluse jobs hosts token`.",
    ),
    "CREDENTIAL_REVOKED": ApiErrorCode(
        401,
        "The credential of an agent is not known, or was revoked.",
        "Enrol the agent again, with a new token: `ecluse jobs hosts token`.",
    ),
    "LEASE_LOST": ApiErrorCode(
        409,
        "The lease of the attempt has expired; the attempt is recorded as failed.",
        "Stop the job. A late result may still be reported: it is stored as evidence.",
    ),
    "FENCE_UNKNOWN": ApiErrorCode(
        409, "The attempt was never given out with this fence; nothing was changed.", "Send the fence of the claim."
    ),
    "LOG_GAP": ApiErrorCode(
        409, "A part of the log before this chunk is missing.", "Send the log from the offset that `details` names."
    ),
    "SERVER_GONE": ApiErrorCode(
        409,
        "The server of the job schedule was deleted; no job was made.",
        "Change `serverInstanceId` of the schedule.",
    ),
    "FLOW_NOT_LOADED": ApiErrorCode(
        409,
        "The run belongs to a flow that this server has not loaded.",
        "Ask a server that is started with that flow.",
    ),
    "RUN_NOT_ENDED": ApiErrorCode(
        409, "The run is still open, and only an ended run can be redriven.", "Wait for its end, or end it first."
    ),
    "RUN_OPEN": ApiErrorCode(
        409, "An open run uses the fiche that is to be erased.", "Wait for the end of the run, or end it first."
    ),
    "CALL_IN_FLIGHT": ApiErrorCode(
        409, "A vendor call about the fiche that is to be erased is in flight.", "Repeat the request when it is over."
    ),
    "NOTHING_FAILED": ApiErrorCode(
        409, "The run has no failed targets to redrive.", "Nothing: there is nothing to repeat."
    ),
    "ONLY_CANCELLED": ApiErrorCode(
        409, "All targets that did not succeed were cancelled.", "Set `outcome` to `all` to redrive those."
    ),
    "ONLY_HOPELESS": ApiErrorCode(
        409, "All failed targets would fail again.", "Correct what the message names, or redrive the hopeless ones too."
    ),
    "NOTHING_CHOSEN": ApiErrorCode(
        409,
        "No target that did not succeed matches the filter of the redrive.",
        "Preview the redrive, and widen its filter.",
    ),
    "SUCCEEDED_SINCE": ApiErrorCode(
        409,
        "The chosen targets have succeeded since, in a redrive of the run; nothing was started.",
        "Nothing, or set `include_succeeded` to repeat them nevertheless.",
    ),
    "NO_REDRIVE": ApiErrorCode(409, "Runs of this flow cannot be redriven.", "Start a new run, as the message says."),
    "SCHEDULE_GONE": ApiErrorCode(409, "The schedule of the run is deleted.", "Create a schedule and trigger that."),
    "SCHEDULE_INACTIVE": ApiErrorCode(409, "The schedule is switched off.", "Set `is_active` to true first."),
    "NAME_TAKEN": ApiErrorCode(409, "Another record of this kind has this name.", "Choose another name."),
    "KEY_TAKEN": ApiErrorCode(
        409, "The key is that of an open run of another flow or schedule.", "Use a key that no other run has."
    ),
    "CONFIG_INACTIVE": ApiErrorCode(409, "The audit config is switched off.", "Set `is_active` to true first."),
    "INVALID_PRIORITY": ApiErrorCode(400, "The priority is not a known one.", "Use `high`, `normal` or `low`."),
    "NO_PLAN": ApiErrorCode(
        409,
        "The preview of the rule run is not finished, or its plan changes no price.",
        "Wait for the end of the preview; if it has failed, preview the rule again. Read the exclusions of the run.",
    ),
    # Connections to vendors
    "NO_CONNECTION": ApiErrorCode(
        409,
        "The tenant has no connection to a vendor that the run needs.",
        "Add it: `ecluse connections create KIND --base-url URL --api-key-file FILE`.",
    ),
    "CONNECTION_EXISTS": ApiErrorCode(
        409, "The tenant has a connection of this kind already.", "Change it with PATCH, or delete it first."
    ),
    "CONNECTION_REFUSED": ApiErrorCode(
        422,
        "The vendor did not accept the connection, or could not be reached; nothing was stored.",
        "Correct the URL or the key, as the message says.",
    ),
    # Notifications and webhooks
    "NO_SECRET_KEY": ApiErrorCode(
        409, "The server has no key to encrypt secrets with.", "Set ECLUSE_SECRET_KEY or ECLUSE_SECRET_KEY_FILE."
    ),
    "NO_WEBHOOK": ApiErrorCode(
        409, "The schedule has no webhook whose secret could be rotated.", "Set `webhook_url` first."
    ),
    "NOT_SIGNED": ApiErrorCode(
        409, "The endpoint is a mail endpoint, and mails are not signed.", "Rotate webhooks only."
    ),
    "MAIL_NOT_CONFIGURED": ApiErrorCode(
        409, "The server is not set up to send mail.", "Set SMTP_HOST, MAIL_FROM and ECLUSE_PUBLIC_URL."
    ),
    "ASKED_ALREADY": ApiErrorCode(
        409, "The address was sent a link within the last hour.", "Follow that link, or wait until the time it names."
    ),
    "ENDPOINT_OFF": ApiErrorCode(409, "The endpoint is switched off.", "Set `is_active` to true first."),
    "STILL_PENDING": ApiErrorCode(
        409, "The message is still being delivered.", "Wait for the attempt whose time the message names."
    ),
    # Realtime
    "REALTIME_OFF": ApiErrorCode(
        409, "Realtime is switched off for this tenant.", "Do what the message says, or poll instead.", also=403
    ),
    "NO_PRESENCE": ApiErrorCode(
        400, "The channel is no presence channel and has no users.", "Do not ask for its users."
    ),
    "STOPPING": ApiErrorCode(503, "The server is stopping.", "Connect again: another replica answers."),
    # Limits
    "RATE_LIMITED": ApiErrorCode(
        429,
        "More was asked for than a limit a minute allows, which `details` names: of the key, the tenant or a fiche.",
        "Repeat the request after Retry-After seconds; `GET /api/limits` shows what is used.",
    ),
    "TOO_MANY_AT_ONCE": ApiErrorCode(
        429,
        "The tenant has as many requests of this kind in progress as allowed; `details` names the limit.",
        "Repeat the request after Retry-After seconds, and send fewer at once.",
    ),
    "TOO_MANY_CONNECTIONS": ApiErrorCode(
        429,
        "The key or its tenant has as many open streams as allowed.",
        "Close one, or retry after Retry-After seconds.",
    ),
    "LIMIT_REACHED": ApiErrorCode(
        429,
        "The tenant has as many of these as allowed; `details` names the limit.",
        "Remove one, where the message says so, or have the operator raise the knob that the message names.",
    ),
    "ANSWER_TOO_LARGE": ApiErrorCode(
        422, "The answer has more bytes than allowed.", "Ask for fewer rows (`limit`), or narrow the filters."
    ),
    # Pages
    "ANOTHER_SITE": ApiErrorCode(403, "A form was submitted from another site.", "Submit it from the page itself."),
}
