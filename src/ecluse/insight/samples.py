"""Metrics that flows declare as data and read from the database for all of their records at once: for the API under
their dotted names, for Prometheus with underscores, after `ecluse_`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from ecluse.db.query import Row

Type = Literal["counter", "gauge", "histogram"]


class Sample(NamedTuple):
    """A value of a metric. None: there is none. Of a histogram it is the number of values, beside their sum and, by
    bound, how many are at most so large."""

    metric: Metric
    labels: Mapping[str, str]  # of the record and of the metric
    value: float | None
    sum: float | None = None
    buckets: Mapping[str, int] | None = None


class Metric(NamedTuple):
    """`column`: its value in the figures of a record. Metrics of one name differ in `labels`."""

    name: str
    type: Type
    meaning: str
    column: str
    labels: Mapping[str, str] = {}

    def sample(self, figures: Row, of: Mapping[str, str], total: str, bounds: Sequence[int]) -> Sample:
        """Return the sample of a record with the labels `of`. For a histogram, `total` is the column of the sum, and
        each of the bounds is a column."""
        found = Sample(self, {**of, **self.labels}, figures[self.column])
        if self.type != "histogram":
            return found
        return found._replace(sum=figures[total], buckets={str(one): figures[str(one)] for one in bounds})
