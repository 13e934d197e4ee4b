"""The registry of simulated vendors: name to class, mounted at ``/`` + the name with dashes."""

from __future__ import annotations

from ecluse.sandbox.vendor import Vendor
from ecluse.sandbox.vendors.api_entreprise import ApiEntreprise
from ecluse.sandbox.vendors.audio import Audio
from ecluse.sandbox.vendors.crm import Crm
from ecluse.sandbox.vendors.elevenlabs import ElevenLabs
from ecluse.sandbox.vendors.inpi import Inpi
from ecluse.sandbox.vendors.llm import Llm
from ecluse.sandbox.vendors.pagerduty import PagerDuty
from ecluse.sandbox.vendors.price_list import PriceList
from ecluse.sandbox.vendors.recherche_entreprises import RechercheEntreprises
from ecluse.sandbox.vendors.shopify import Shopify
from ecluse.sandbox.vendors.slack import Slack

VENDORS: dict[str, type[Vendor]] = {
    "api_entreprise": ApiEntreprise,
    "audio": Audio,
    "crm": Crm,
    "elevenlabs": ElevenLabs,
    "inpi": Inpi,
    "llm": Llm,
    "pagerduty": PagerDuty,
    "price_list": PriceList,
    "recherche_entreprises": RechercheEntreprises,
    "shopify": Shopify,
    "slack": Slack,
}
