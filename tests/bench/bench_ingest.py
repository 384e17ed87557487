"""How many events a second one caller gets into the books. Run: python -m tests.bench.bench_ingest [URL]

Owns: the load (batches of 1,000 events of 20 orgs, 60 keys and 2 models, with UUIDv7 of their own times, as a gateway's
are) and the report.
Without a URL it uses an SQLite file under /tmp. Bars of the ledger's issue: 3,000 events/s into SQLite, 5,000 into
PostgreSQL.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from billing.adapters import books_sql, sql
from billing.adapters.ingest import Ingest, IngestBatch, SpoolOffset
from billing.ledger import event_id_floor
from billing.pricing import Sku
from billing.usage_event import UsageEvent
from tests.fakes.ledger_events import NOON_NS, a_book, usage_event


def load(count: int, seed: int = 1) -> list[UsageEvent]:
    """Events of many tenants, ending about 1 ms apart."""
    dice = random.Random(seed)
    events = []
    for index in range(count):
        org = dice.randrange(20)
        ended_ns = NOON_NS + index * 1_000_000
        events.append(
            usage_event(
                int(f"{event_id_floor(ended_ns)}7{dice.getrandbits(76):019x}", 16),
                request_id=f"req_{index:016x}",
                org_id=f"org_{org}",
                project_id=f"project_{org}_{dice.randrange(2)}",
                key_id=f"key_{org}_{dice.randrange(3)}",
                model_served=dice.choice(("llama", "qwen")),
                uncached_input_tokens=dice.randrange(20_000),
                cached_input_tokens=dice.randrange(100_000),
                output_tokens=dice.randrange(4_000),
                received_ns=ended_ns,
                opened_ns=ended_ns,
                first_token_ns=ended_ns,
                ended_ns=ended_ns,
            )
        )
    return events


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url", nargs="?")
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=1_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        url = options.url or f"sqlite:///{Path(folder) / 'bench.db'}"
        sql.upgrade(url)
        engine = sql.engine(url)
        prices = dict(a_book().prices)
        prices.update({("qwen", tier, sku): price for (_, tier, sku), price in a_book().prices.items()})
        prices["qwen", "default", Sku.OUTPUT] = 600_000
        books_sql.add_book(engine, a_book(prices=prices), retroactive=True)
        events = load(options.events)
        ingest = Ingest(engine)
        began = time.perf_counter()
        cpu = time.process_time()
        for start in range(0, len(events), options.batch):
            part = events[start : start + options.batch]
            ingest.write(IngestBatch(part, offsets=[SpoolOffset("node-0", "1", 1, start + len(part))]))
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        engine.dispose()
    print(
        json.dumps(
            {
                "events": len(events),
                "database": sql.safe_url(url).split(":")[0],
                "events_per_s": round(len(events) / took_s),
                "cpu_us_per_event": round(1e6 * cpu_s / len(events), 1),
            }
        )
    )


if __name__ == "__main__":
    main()
