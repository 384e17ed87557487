"""The faults of the billing library.

    BillingError
    +-- MoneyError             an amount is no whole number of picodollars, or currencies were mixed
    +-- PriceBookError         a price book cannot be used as written, or would change one that is in use
    +-- UnbalancedTransfer     a posting whose entries do not sum to zero (a fault of ours, never posted)
    +-- PeriodClosed           a posting was meant for a period that is sealed
    +-- ReportQueryError       a usage or cost query asks for what does not exist (the caller's fault)
    +-- ReconcileInputError    a spool folder or an engine's counters, given to compare with, cannot be read
    +-- StoreError             the database
        +-- SchemaOutdated     its tables are not at this version: run `inferplane db upgrade`
        +-- StoreUnavailable   it did not answer, or refused our transaction too many times in a row

Expected outcomes (a repeated event, a model without a price, a difference found by reconcile) are values, not
exceptions. No message ever contains a URL with credentials. A malformed record of the spool is
`billing.usage_event.MalformedEvent`: that module may import nothing of this package.
"""

from __future__ import annotations


class BillingError(Exception):
    """Root of this package's faults."""


class MoneyError(BillingError):
    """An amount is no whole number of picodollars, out of range, or in another currency than the one expected."""


class PriceBookError(BillingError):
    """A price book cannot be used as written. The message names the field, the value and what was expected."""


class UnbalancedTransfer(BillingError):
    """The entries of a posting do not sum to zero, or have no accounts on both sides."""


class PeriodClosed(BillingError):
    """The period that a posting was meant for is sealed. `period_id` names it."""

    def __init__(self, period_id: str) -> None:
        super().__init__(f"Period {period_id} is closed; a posting goes to an open period.")
        self.period_id = period_id


class ReportQueryError(BillingError):
    """A usage or cost query cannot be answered as asked. `param` names the parameter."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class ReconcileInputError(BillingError):
    """What the ledger was to be compared with cannot be read."""


class StoreError(BillingError):
    """The database cannot be used."""


class SchemaOutdated(StoreError):
    """The tables are not those of this version. The message is one sentence that says what to run."""


class StoreUnavailable(StoreError):
    """The database did not answer in time, or aborted our transaction more often than we retry."""
