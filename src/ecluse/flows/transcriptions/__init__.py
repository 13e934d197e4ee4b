"""The recordings of a fiche, written down: one run per fiche, one item per recording, each paid for once."""
