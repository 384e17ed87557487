"""The limits port over a store inside this process.

Owns: `InProcessLimits`, which puts `Leases` and `Buckets` behind the port without any I/O. It serves a single process
that has no Redis, and it is the reference that the contract suite holds `adapters.limits_redis` to. Does not own: any
rule.
"""

from __future__ import annotations

from controlplane.leases import Leases
from controlplane.rate_limit import NO_LIMITS, Admitted, Buckets, Cost, Refused, StoreState, Ticket
from controlplane.tenancy import Limit


class InProcessLimits:
    """The port over a store in this process: for one process without Redis, and for the contract suite."""

    def __init__(self, process_id: str = "local") -> None:
        self._leases = Leases(process_id, ahead=False)
        self._buckets = Buckets()

    def try_admit(self, limits: tuple[Limit, ...], cost: Cost, now_ns: int) -> Admitted | None:
        """From leases; see `Leases.try_spend`."""
        return self._leases.try_spend(limits, cost, now_ns) if limits else Admitted(Ticket(cost, []), NO_LIMITS)

    async def admit(self, limits: tuple[Limit, ...], cost: Cost, now_ns: int) -> Admitted | Refused:
        """One attempt at the store; never waits. What is held is told first: leases may have ended meanwhile."""
        self._report(now_ns)
        plan = self._leases.plan(limits, cost, now_ns)
        if isinstance(plan, Refused):
            return plan
        reply = self._buckets.attempt(plan.attempt, now_ns // 1_000)
        decision = self._leases.merge(plan, reply, now_ns, now_ns)
        assert decision is not None, "one clock and no way between: a lease held here has not ended there"
        self._report(now_ns)
        return decision

    def settle(self, ticket: Ticket, used: Cost, now_ns: int) -> None:
        """Settle and report at once."""
        self._leases.settle(ticket, used, now_ns)
        self._report(now_ns)

    async def flush(self, now_ns: int) -> None:
        """Tell the store everything that is due."""
        self._report(now_ns)

    def state(self) -> StoreState:
        """It always answers."""
        return StoreState(answering=True, since_ns=0, policy="refuse", detail="limits are kept in this process")

    def _report(self, now_ns: int) -> None:
        self._leases.begin_round()
        while (report := self._leases.report(now_ns)) is not None:
            reply = self._buckets.attempt(report.attempt, now_ns // 1_000)
            self._leases.reported(report, reply, now_ns)
        self._buckets.drop_idle(self._leases.forgotten(), now_ns // 1_000)
