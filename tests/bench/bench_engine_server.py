"""What the simulated engine's server costs: CPU per streamed token, per long prompt, and while nobody asks.

Not a test: figures depend on the machine. Run it with `python -m tests.bench.bench_engine_server`. It starts one
`engine-sim` process at speed 1 and reads that process's own CPU time, so other work on the machine does not count.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

import psutil

ROUNDS = 3
IDLE_S = 5.0


async def stream(port: int, name: str, prompt_bytes: int, token_count: int) -> None:
    """One chat, read to its end."""
    content = (name + " word" * (prompt_bytes // 5 + 1))[:prompt_bytes]
    request = {"messages": [{"role": "user", "content": content}], "max_tokens": token_count, "ignore_eos": True}
    body = json.dumps({**request, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head % len(body) + body)
    while await reader.read(1 << 16):
        pass
    writer.close()


async def load(port: int, round_number: int, count: int, prompt_bytes: int, token_count: int) -> None:
    names = [f"{round_number} {prompt_bytes} {number}" for number in range(count)]
    await asyncio.gather(*[stream(port, name, prompt_bytes, token_count) for name in names])


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Prints one line a load: the least CPU of three rounds."""
    command = [sys.executable, "-m", "controlplane", "engine-sim", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        port = int(json.loads(child.stdout.readline())["url"].rsplit(":", 1)[1])
        process = psutil.Process(child.pid)
        try:
            for count, prompt_bytes, token_count in ((1, 400, 200), (16, 400, 200), (64, 400, 200), (8, 160_000, 8)):
                used = []
                for round_number in range(ROUNDS):
                    before_s = cpu_s(process)
                    asyncio.run(load(port, round_number, count, prompt_bytes, token_count))
                    used.append(cpu_s(process) - before_s)
                best_s = min(used)
                request_s = best_s / count
                print(
                    f"{count:3} streams of {token_count} tokens, prompts of {prompt_bytes} bytes: "
                    f"{request_s * 1e3:.1f} ms of CPU a request, {request_s / token_count * 1e6:.0f} us a token"
                )
            before_s = cpu_s(process)
            time.sleep(IDLE_S)
            print(f"idle: {(cpu_s(process) - before_s) / IDLE_S:.1%} of a CPU")
        finally:
            child.terminate()


if __name__ == "__main__":
    main()
