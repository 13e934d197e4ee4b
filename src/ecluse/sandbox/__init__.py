"""The sandbox: vendors simulated on the wire, with fault injection, rate caps and a ledger of every call and effect.

It imports nothing from the rest of Ecluse, so that its ledger cannot share a defect with the code that is checked
against it. Start it with ``python -m ecluse.sandbox`` or with ``ecluse.sandbox.server.serve``.
"""
