"""Cached fiches of the CRM, their recordings and transcripts; transcription runs and results that were paid for."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"

FICHES = """
CREATE TABLE fiche_cache (
    id                  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id           text NOT NULL REFERENCES tenants,
    fiche_id            text NOT NULL,
    groupe              text,
    sales_date          date,
    last_revalidated_at timestamptz,
    raw_data            jsonb,
    details_success     boolean,
    details_message     text,
    recordings_count    integer,
    has_recordings      boolean,
    fetched_at          timestamptz,
    created_at          timestamptz NOT NULL,
    updated_at          timestamptz NOT NULL,
    CONSTRAINT fiche_cache_fiche UNIQUE (tenant_id, fiche_id)
);
CREATE INDEX fiche_cache_sales ON fiche_cache (tenant_id, sales_date DESC NULLS LAST, id DESC);
COMMENT ON COLUMN fiche_cache.groupe IS 'from the sales list, which may lack it; the details have the last word';
COMMENT ON COLUMN fiche_cache.raw_data IS 'the sales row, or the details in full as older versions kept them';
COMMENT ON COLUMN fiche_cache.details_success IS 'false with a message holding NOT_FOUND: gone upstream, for good';
COMMENT ON COLUMN fiche_cache.fetched_at IS 'when the details were last asked for and answered';

CREATE TABLE fiche_cache_information (
    fiche_cache_id      bigint PRIMARY KEY REFERENCES fiche_cache ON DELETE CASCADE,
    groupe              text,
    attribution_user_id text,
    data                jsonb NOT NULL DEFAULT '{}',
    updated_at          timestamptz NOT NULL
);
COMMENT ON TABLE fiche_cache_information IS 'there is a row exactly when the details are known in full';

CREATE TABLE recordings (
    id                 bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    fiche_cache_id     bigint NOT NULL REFERENCES fiche_cache ON DELETE CASCADE,
    call_id            text NOT NULL,
    recording_url      text NOT NULL DEFAULT '',
    start_time         timestamptz,
    duration_s         double precision,
    has_transcription  boolean NOT NULL DEFAULT false,
    transcription_id   text,
    transcription_text text,
    transcription_data jsonb,
    transcribed_at     timestamptz,
    removed_at         timestamptz,
    created_at         timestamptz NOT NULL,
    updated_at         timestamptz NOT NULL,
    CONSTRAINT recordings_call UNIQUE (fiche_cache_id, call_id),
    CONSTRAINT recordings_transcribed CHECK
        (NOT has_transcription OR (transcription_text IS NOT NULL AND transcribed_at IS NOT NULL))
);
COMMENT ON COLUMN recordings.recording_url IS 'blank: the CRM has none';
COMMENT ON COLUMN recordings.has_transcription IS 'the one truth; written by the transcription flow alone';
COMMENT ON COLUMN recordings.transcription_data IS 'the words, only where no chunks could be made of them';
COMMENT ON COLUMN recordings.removed_at IS 'gone upstream: out of totals and gates, the transcript is kept';

CREATE TABLE recording_transcription_chunks (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    recording_id bigint NOT NULL REFERENCES recordings ON DELETE CASCADE,
    position     integer NOT NULL,
    speaker      text,
    start_s      double precision,
    end_s        double precision,
    text         text NOT NULL,
    CONSTRAINT recording_transcription_chunks_position UNIQUE (recording_id, position)
);
"""

TRANSCRIPTION = """
CREATE TABLE transcription_runs (
    run_id              bigint PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
    tenant_id           text NOT NULL,
    fiche_id            text NOT NULL,
    fiche_cache_id      bigint,
    total_recordings    integer,
    already_transcribed integer,
    target_total        integer,
    processed           integer,
    cached              integer,
    failed              integer,
    stalled_at          timestamptz
);
CREATE INDEX transcription_runs_fiche ON transcription_runs (tenant_id, fiche_id, run_id);
CREATE INDEX transcription_runs_stalled ON transcription_runs (run_id) WHERE stalled_at IS NOT NULL;
COMMENT ON TABLE transcription_runs IS 'what a run of one fiche planned and, once it has ended, did: kept for good';
COMMENT ON COLUMN transcription_runs.processed IS 'null while it runs: then items and claims say it';

CREATE TABLE transcription_requests (
    tenant_id  text NOT NULL,
    fiche_id   text NOT NULL,
    minute     timestamptz NOT NULL,
    requests   integer NOT NULL,
    last_ms    bigint NOT NULL,
    PRIMARY KEY (tenant_id, fiche_id)
);
COMMENT ON COLUMN transcription_requests.last_ms IS 'of the last request, never the same twice: it names the event';
COMMENT ON TABLE transcription_requests IS 'how often somebody asked within the present minute';

CREATE TABLE speech_results (
    tenant_id        text NOT NULL,
    key              bytea NOT NULL,
    call_id          text NOT NULL,
    model            text NOT NULL,
    transcription_id text,
    text             text NOT NULL,
    chunks           jsonb,
    created_at       timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, key)
);
COMMENT ON COLUMN speech_results.key IS 'SHA-256 of call, URL without its query, model and parameters: paid for once';
"""


PAID = """
ALTER TABLE attempts ADD COLUMN maybe_paid boolean;
COMMENT ON COLUMN attempts.maybe_paid IS 'a call that costs money was repeated though its first answer may exist';
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    for part in (FICHES, TRANSCRIPTION, PAID):
        connection.execute(part)  # type: ignore[union-attr]
