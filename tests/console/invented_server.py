"""Invents the state of a server with two groups of workers, of which one has failed."""

import math

from tests.console.invented import START


def _main_group(now: float) -> dict:
    gib = 2**30
    uses = {"base weights": 8.1, "training slots": 6.2, "sampler slots": 1.1, "steps while they run": 21.4}
    programs = ["forward_backward 4x2048", "prefill 8x512", "decode 64x2048", "optim_step"]
    return {
        "name": "main",
        "base_model": "Qwen/Qwen3-4B",
        "role": "train and sample",
        "state": "ready",
        "phase": "running",
        "waiting": 4,
        "running": 3,
        "busy": 0.87,
        "mesh": {"fsdp": 4, "ep": 1, "tp": 2},
        "device": "4 x H200",
        "hosts": ["node-a", "node-b"],
        "generations": [
            _generation(2, now - 1200, None, None),
            _generation(
                1,
                now - 9000,
                now - 1210,
                "worker 1 on node-b was killed by signal 9 (SIGKILL), during command 8812 (forward_backward)",
            ),
        ],
        "programs": {
            "ready": 121,
            "planned": 133,
            "compiling": "prefill 16x1024",
            "recent": [
                {
                    "program": name,
                    "seconds": 3.2 + n,
                    "ended_at": now - 20 * n,
                    "waiting": n % 2,
                    "error": None,
                }
                for n, name in enumerate(programs)
            ],
        },
        "memory": {
            "device_bytes": 120 * gib,
            "uses": [
                *({"use": use, "bytes": int(size * gib), "note": ""} for use, size in uses.items()),
                {"use": "keys and values", "bytes": 83 * gib, "note": "for 1204224 tokens"},
            ],
            "choices": [["micro-batch of training", "up to 16384 tokens, or one longer sequence"]],
        },
    }


def _teacher_group(now: float) -> dict:
    return {
        "name": "teacher",
        "base_model": "Qwen/Qwen3-30B-A3B",
        "role": "sample",
        "state": "failed",
        "phase": "failed, and tried again later: model-00003-of-00016.safetensors is damaged",
        "waiting": 2,
        "running": 0,
        "busy": 0.0,
        "mesh": {"fsdp": 1, "ep": 4, "tp": 1},
        "device": None,
        "hosts": ["node-c"],
        "generations": [_generation(1, now - 700, now - 600, "worker 0 on node-c has ended")],
        "programs": {"ready": 0, "planned": 0, "compiling": None, "recent": []},
        "memory": None,
    }


def server() -> dict:
    """A server of two hosts that has lost a worker, with three tenants."""
    gib = 2**30
    now = START + 1600.0
    tenants = [("ada", 0.52, 3, 2, 410), ("grace", 0.40, 1, 1, 1200), ("edsger", 0.08, 0, 0, 12)]
    return {
        "version": "0.9.0",
        "started_at": now - 9000,
        "now": now,
        "phase": "running",
        "is_ready": True,
        "refusal": None,
        "groups": [_main_group(now), _teacher_group(now)],
        "window_seconds": 300.0,
        "tenants": [
            {
                "owner": owner,
                "waiting": waiting,
                "running": running,
                "oldest_seconds": 2.5 if waiting else None,
                "finished": finished,
                "wait_median": 0.12,
                "wait_most": 3.4,
                "tokens": 900 * finished,
                "device_share": share,
            }
            for owner, share, waiting, running, finished in tenants
        ],
        "queue": [
            _unfinished(
                "forward_backward", 14.2, "taking turns with 1 other model, which has 2 micro-batches ready"
            ),
            _unfinished("sample", 2.5, None),
        ],
        "queue_length": 5,
        "throughput": [
            {
                "at": now - 300 + 5 * n,
                "trained": 9000 + 2500 * math.sin(n / 5),
                "sampled": 5200 + 1800 * math.cos(n / 3),
                "busy": 0.9 + 0.08 * math.sin(n),
            }
            for n in range(60)
        ],
        "disk": {
            "free_bytes": 410 * gib,
            "bytes_by_kind": {"snapshots": 31 * gib, "checkpoints": 22 * gib, "payloads": 7 * gib},
            "problem": None,
        },
        "suspects": [
            {
                "id": "9f31c2aa77d0",
                "kind": "forward_backward",
                "line": "00000003-train-0",
                "owner": "grace",
                "state": "unfinished",
                "losses": 1,
                "coordinator_losses": 0,
                "reason": None,
            }
        ],
    }


def _unfinished(kind: str, seconds: float, reason: str | None) -> dict:
    facts = {"id": "5f0c44a1", "kind": kind, "line": "00000000-0000:train:0", "owner": "grace"}
    return {**facts, "seconds": seconds, "is_running": reason is None, "reason": reason}


def _generation(number: int, began_at: float, ended_at: float | None, reason: str | None) -> dict:
    return {
        "number": number,
        "began_at": began_at,
        "ready_at": began_at + 38.5,
        "ended_at": ended_at,
        "reason": reason,
    }
