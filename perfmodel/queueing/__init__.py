"""TTFT, TPOT and throughput of one engine, or k equal ones, in closed form: no events, well under a millisecond a call.

Owns: the two questions (`loops.open_loop`, `loops.closed_loop`) and what answers them: step lengths and Little's law
(`work`), arrivals (`laws`), the prompts that wait as a Markov chain (`chain`), what an arrival meets
(`tagged`) and the fixed point of all (`load`). Does not own: step times (`step_time`), what fits (`memory`) or the
truth: a seeded replay (`harness`) checks this package over the grid of `tests/bench/bench_queueing.py`.
The chain of thought. Engine steps are a gated queue: what arrives during a step is served in the next one, whose length
depends on what arrived. So the prompt work per step forms a Markov chain; a tagged arrival sees a step in proportion to
its length, waits for its rest, then for full steps ahead of it when the token budget binds, then for its own. A wait
for a sequence slot or for KV room runs beside it: the number present is a birth and death chain whose members share the
engine, and from all slots on a queue with many servers.
"""
