"""The broker: ledger, queue, registry of peers. No torch; starts in under a second."""
