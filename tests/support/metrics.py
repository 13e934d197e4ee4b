"""Metrics as a monitoring system reads them."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def scrape(server) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by metric and labels (by their names). Fails on what is not in the format."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            values.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return values
