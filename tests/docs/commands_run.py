"""Where each command of the documentation is run: by a test, over one small job here, or nowhere, and why."""

from __future__ import annotations

HERE = (
    *("ckpt ls", "ckpt log", "ckpt show", "ckpt tree", "ckpt du", "ckpt stats", "ckpt diff", "ckpt plan"),
    *("ckpt provenance", "ckpt cat", "ckpt verify", "ckpt tag", "ckpt untag", "ckpt pin", "ckpt unpin", "ckpt gc"),
    *("ckpt export", "samples check", "goodput", "timeline", "report", "explain", "status", "events", "top"),
    *("plan", "init", "chaos list"),
)
"""Each line of these that the documentation has is run, with the job's own store, events and endpoint in place of those
that are printed, unless `NOT_RUN` says why not."""

ELSEWHERE = {
    "agent": "tests/deploy/test_systemd.py",
    "calibrate": "tests/calibration/test_calibrate.py",
    "chaos inject": "tests/chaos/test_inject.py",
    "chaos random": "tests/chaos/storms/test_random_runs.py",
    "chaos replay": "tests/chaos/storms/test_random_runs.py",
    "chaos report": "tests/chaos/report/test_report.py",
    "chaos run": "tests/histories/test_random_storms.py",
    "chaos score": "tests/histories/test_score.py",
    "chaos shrink": "tests/histories/test_random_storms.py",
    "chaos soak": "tests/chaos/growth/test_soak.py",
    "ckpt adapters": "tests/pretrained/test_adapters.py",
    "ckpt import": "tests/cli/ckpt/test_interchange.py",
    "ckpt repair": "tests/cli/ckpt/test_commands.py",
    "dashboard": "tests/cli/status/test_dashboard.py",
    "doctor": "tests/doctor/test_command.py",
    "drain": "tests/cli/status/test_node_commands.py",
    "eval": "tests/evaluation/test_eval.py",
    "etcd backup": "tests/etcd_server/test_commands.py",
    "etcd restore": "tests/etcd_server/test_up.py",
    "etcd status": "tests/etcd_server/test_commands.py",
    "etcd up": "tests/etcd_server/test_up.py",
    "islands leave": "tests/cli/test_islands.py",
    "islands show": "tests/cli/test_islands.py",
    "quarantine": "tests/cli/status/test_node_commands.py",
    "release": "tests/cli/status/test_node_commands.py",
    "simulate commits": "tests/chaos/commits/test_command.py",
    "simulate membership": "tests/chaos/simulation/test_command.py",
    "simulate goodput": "tests/chaos/goodput/test_command.py",
}
"""Files whose tests run these commands, with options of their own."""

NOWHERE = {
    "demo": "half a minute of both cores: `make demo` runs it, and the tests play the same histories without it",
}
"""Commands that no test runs as they are typed."""

NOT_RUN = {
    "--config": "needs the folder of a model of transformers",
    "--calibration": "needs the file of a calibration",
    "--follow": "runs until it is stopped",
    "train.py": "needs a script of the reader's",
    "verified": "the job here is too short for a checkpoint to be read back",
    "vetted": "the job here audits nothing",
    "~/gpt": "needs the reader's own code",
    "pp=2": "needs a model whose blocks divide so",
}
"""Words of lines that are not run, though their command is, and the reason."""
