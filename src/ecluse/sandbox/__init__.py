"""The sandbox: vendors simulated on the wire, with fault injection, rate caps and a ledger of every call and effect.

It stands alone: it imports nothing from the rest of Ecluse, so that what it reports cannot share a defect with what
it judges. Start it with ``python -m ecluse.sandbox`` or with ``ecluse.sandbox.server.serve``.
"""
