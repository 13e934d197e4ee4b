"""Work of an audit item: one call to the model answers all steps of a config for a fiche. Retries, pauses, statuses and
commits are the engine's."""

from __future__ import annotations

from decimal import Decimal
from functools import partial
from typing import Any

from ecluse.base.errors import PermanentError
from ecluse.engine import Charge, Done, Item, Result, WorkContext
from ecluse.flows.audits import prompts, quotes, steps
from ecluse.flows.audits.quotes import Spoken
from ecluse.flows.audits.steps import Answered, Step
from ecluse.flows.audits.transcripts import Recording, Transcripts
from ecluse.flows.connections.registry import Vendors
from ecluse.vendors.llm import Llm


async def audit(max_input_chars: int, context: WorkContext, item: Item) -> Result:
    """Audit a fiche with one config: the work of an audit item. Without a transcript, or with more than
    `max_input_chars` of it, the item fails without a call; an audit that is completed already is not paid for again."""
    vendors: Vendors = context.vendors
    audit_input = await vendors.shared(Transcripts).look(context, item)
    recordings = [recording for recording in audit_input.recordings if recording.text.strip()]
    text = prompts.transcript(recordings)
    asked = audit_input.asked
    if audit_input.done is None and 0 < len(text) <= max_input_chars:

        async def charge(llm: Llm) -> Charge:
            return Charge("llm", llm.chosen(asked.model), llm.most(asked.model, prompts.system(asked), text))

        await context.pay(item, charge=await vendors.llm(context, item, charge))
    result = {"audit_id": item.payload["audit_id"]}
    if audit_input.done is not None:
        return Done({**result, "score": float(audit_input.done)})
    if not text:
        why = f"Fiche {item.target} has no transcript: it has no recordings, or they are not transcribed yet."
        raise PermanentError(why, code="NO_TRANSCRIPT")
    if len(text) > max_input_chars:
        raise PermanentError(
            f"The transcript of fiche {item.target} has {len(text)} characters, and AUDIT_MAX_INPUT_CHARS is"
            f" {max_input_chars}.",
            code="TRANSCRIPT_TOO_LONG",
        )
    answer = await vendors.llm(
        context,
        item,
        lambda llm: llm.ask(
            system=prompts.system(asked),
            user=text,
            schema=steps.schema(asked.steps),
            read=partial(steps.read, asked.steps),
            name=item.event_id,
            model=asked.model,
        ),
    )
    score = steps.score(asked.steps, [one.score for one in answer.answer])
    kept = {
        "score": score,
        "result": {"steps": judged(asked.steps, answer.answer, recordings)},
        "model": answer.model,
        "input_tokens": answer.input_tokens,
        "output_tokens": answer.output_tokens,
        "cost": _plain(answer.cost),
    }
    return Done({**result, "score": score}, kept=kept, cost=answer.cost)


def judged(asked: list[Step], answers: list[Answered], recordings: list[Recording]) -> list[dict[str, Any]]:
    """Return each step with its answer and the result of the check of its quotes."""
    spoken = [Spoken(recording.call_id, recording.text) for recording in recordings]
    return [_judged(step, answer, spoken) for step, answer in zip(asked, answers, strict=True)]


def _judged(step: Step, answer: Answered, spoken: list[Spoken]) -> dict[str, Any]:
    """Return a step with its answer and the result of the check of its quotes."""
    return {
        "name": step.name,
        "score": answer.score,
        "max": step.max_score,
        "weight": step.weight,
        "comment": answer.comment,
        **quotes.check(answer.quotes, spoken),
    }


def _plain(cost: Decimal | None) -> str | None:
    """Return the cost as text without an exponent."""
    return None if cost is None else f"{cost:f}"
