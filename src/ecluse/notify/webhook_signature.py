"""Signatures of webhooks (Standard Webhooks), their signing secrets, and the names under which secrets and URLs are
stored encrypted."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta

from standardwebhooks import Webhook

SECRET_BYTES = 32
OLD_SECRET_SIGNS = timedelta(days=1)


def new_secret() -> str:
    """Return a random signing secret, in the form of Standard Webhooks (`whsec_…`)."""
    return f"whsec_{base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()}"


def schedule_webhook_secret_name(schedule_id: int) -> str:
    """Return the name under which the signing secret of a schedule's own webhook is stored encrypted."""
    return f"schedule:{schedule_id}:webhook"


def schedule_url_name(schedule_id: int) -> str:
    """Return the name under which the URL of a schedule's own webhook is stored encrypted."""
    return f"schedule:{schedule_id}:webhook:url"


def old_name(secret_name: str) -> str:
    """Return the name under which the predecessor of a replaced secret is stored encrypted. `secret_name`: that of the
    current one."""
    return f"{secret_name}:old"


def signed(keys: Sequence[str], name: str, at: datetime, body: str) -> dict[str, str]:
    """Return the headers of a webhook with the message id `name` and this body, sent at `at`, signed with each of
    `keys`: two while a secret is being rotated, none for a webhook without a secret."""
    headers = {"webhook-id": name, "webhook-timestamp": str(int(at.timestamp()))}
    if keys:
        headers["webhook-signature"] = " ".join(Webhook(key).sign(name, at, body) for key in keys)
    return headers
