"""The fault lab: seeded schedules over the real machines, in virtual time, with everything failing.

A schedule is a setting (pools, times, requests, how often what fails) and a sequence of decisions,
all drawn from one seed. The real `Owner` and the real `SourceAttempt` are driven through channels
that drop, delay, double, reorder, cut and forge encoded messages; source processes are stopped,
continued, killed and started again; engines fail in every way that the contract leaves them; the
device refuses, fails, is late or never comes back; callers cancel at any event; deadlines pass.

After every step two statements of the rules are compared with what the machines did: the ledger of
the explorer, which knows no table, and the bytes themselves, each known by the request, the attempt
and the cell that it is. In the end all faults stop and everything must come to rest.

    python -m headrace.testing.fault_lab --schedules 100000 --seed 1 --jobs 2 --out FILE
    python -m headrace.testing.fault_lab --one-lane --schedules 100000 --out FILE
    python -m headrace.testing.fault_lab --replay TEXT
    python -m headrace.testing.fault_lab --mutants
"""
