"""Fiches as the CRM tells them: fetched in full, cached, shown to whom they concern. Other flows stand on this room,
which knows none of them."""
