"""The samples that a worker trains on.

Users iterate over a `lease`: a fixed split of the samples, or ranges of them from a ledger (`ledger_lease`). A
`lease_source` reaches the ledger: the scheduler's, or one inside the process. control/leases.py is the ledger itself.
"""
