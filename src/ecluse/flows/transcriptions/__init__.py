"""The transcription of recordings of fiches: one run per fiche, one item per recording, each recording paid for
once."""
