"""The grant: a job's environment is exactly what it was given, and hides every other device."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer_worker import grant as grant_module
from gpulayer_worker.grant import (
    Device,
    Grant,
    Share,
    device_masks,
    job_environment,
    nvidia_library_folders,
    site_packages,
)
from gpulayer_worker.processes.bundle import SHIM

GRANT = Grant(
    job_id="j_0123456789ab",
    attempt=2,
    name="train",
    scratch="/s",
    outputs="/s/work/outputs",
    share=Share(accelerator="cpu", cpus=3, python="/opt/env/bin/python", cache="/c"),
)


def test_the_environment_of_a_cpu_job_is_exactly_this() -> None:
    assert job_environment(GRANT, {}, {}) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "-1",
        "GPULAYER_ACCELERATOR": "cpu",
        "GPULAYER_ATTEMPT": "2",
        "GPULAYER_CACHE": "/c",
        "GPULAYER_GPUS": "0",
        "GPULAYER_JOB_ID": "j_0123456789ab",
        "GPULAYER_NAME": "train",
        "GPULAYER_NODES": "1",
        "GPULAYER_NODE_RANK": "0",
        "GPULAYER_OUTPUTS": "/s/work/outputs",
        "GPULAYER_RANK": "0",
        "GPULAYER_RESUME": "",
        "GPULAYER_SCRATCH": "/s",
        "GPULAYER_WORLD_SIZE": "1",
        "HF_HOME": "/c/huggingface",
        "HIP_VISIBLE_DEVICES": "-1",
        "HOME": "/s/home",
        "OMP_NUM_THREADS": "3",
        "PATH": "/opt/env/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(SHIM),
        "PYTHONUNBUFFERED": "1",
        "TORCH_HOME": "/c/torch",
        "XDG_CACHE_HOME": "/c",
    }


def test_only_named_variables_of_the_worker_go_over() -> None:
    passed = {
        "LANG": "C.UTF-8",
        "LC_TIME": "de_DE.UTF-8",
        "TZ": "UTC",
        "TMPDIR": "/t",
        "https_proxy": "http://p",
        "NO_PROXY": "x",
        "SSL_CERT_FILE": "/pem",
    }
    kept_back = {
        "AWS_SECRET_ACCESS_KEY": "s",
        "GPULAYER_REDIS_URL": "r",
        "LD_PRELOAD": "l",
        "PYTHONHOME": "p",
    }

    environment = job_environment(GRANT, {}, passed | kept_back)

    assert passed.items() <= environment.items()
    assert not kept_back.keys() & environment.keys()


def test_the_jobs_python_comes_first_on_the_path_and_once() -> None:
    environment = job_environment(GRANT, {}, {"PATH": "/usr/bin::/opt/env/bin:/bin"})

    assert environment["PATH"] == "/opt/env/bin:/usr/bin:/bin"


def test_the_submitter_overrides_defaults_but_not_the_grant() -> None:
    wanted = {"OMP_NUM_THREADS": "1", "MINE": "yes", "PYTHONPATH": "lib", "HOME": "/home/me"}
    refused = {"CUDA_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "1", "GPULAYER_JOB_ID": "other"}

    environment = job_environment(GRANT, wanted | refused, {})

    assert environment["MINE"] == "yes"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["HOME"] == "/home/me"
    assert environment["PYTHONPATH"] == f"lib:{SHIM}"
    assert environment["CUDA_VISIBLE_DEVICES"] == "-1"
    assert environment["GPULAYER_JOB_ID"] == GRANT.job_id
    assert "ROCR_VISIBLE_DEVICES" not in environment


def test_whole_gpus_are_named_by_number_and_slices_by_uuid() -> None:
    whole = (Device(3, "GPU-a"), Device(1, "GPU-b"))
    sliced = (Device(0, "MIG-c", by_uuid=True),)

    assert device_masks("cuda", whole)["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert device_masks("cuda", sliced)["CUDA_VISIBLE_DEVICES"] == "MIG-c"


@pytest.mark.parametrize(
    ("accelerator", "mask", "other"),
    [
        ("cuda", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        ("rocm", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_gpu_job_gets_exactly_one_mask(accelerator: str, mask: str, other: str) -> None:
    share = replace(GRANT.share, accelerator=accelerator, devices=(Device(2, "GPU-a"),))
    grant = replace(GRANT, share=share)

    environment = job_environment(grant, {}, {})

    assert environment[mask] == "2"
    assert other not in environment
    assert environment["GPULAYER_GPUS"] == "1"


def test_the_jobs_own_cuda_libraries_come_before_the_submitters() -> None:
    environment = job_environment(GRANT, {"LD_LIBRARY_PATH": "/mine"}, {}, ["/n/cublas/lib", "/n/cudnn/lib"])

    assert environment["LD_LIBRARY_PATH"] == "/n/cublas/lib:/n/cudnn/lib:/mine"


def test_site_packages_are_asked_of_the_jobs_python() -> None:
    assert sysconfig.get_path("purelib") in site_packages(sys.executable)
    assert site_packages("/no/such/python") == ()


def test_cuda_libraries_are_found_where_pip_puts_them_and_again_after_an_install(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {tmp_path}\necho {tmp_path}\n")
    python.chmod(0o755)
    first, second = (tmp_path / "nvidia" / name / "lib" for name in ("cublas", "cudnn"))
    first.mkdir(parents=True)

    assert nvidia_library_folders(str(python)) == (str(first),)

    second.mkdir(parents=True)
    os.utime(tmp_path / "nvidia", ns=(1, 1))
    assert nvidia_library_folders(str(python)) == (str(first), str(second))


VARIABLES = st.dictionaries(
    st.sampled_from(
        [
            "HOME",
            "PATH",
            "PYTHONPATH",
            "LD_LIBRARY_PATH",
            "LANG",
            "GPULAYER_JOB_ID",
            "CUDA_VISIBLE_DEVICES",
            "X",
        ]
    ),
    st.sampled_from(["", "/a", "/a::/b"]),
)
SHARES = st.builds(
    Share,
    accelerator=st.sampled_from(["cpu", "cuda", "rocm"]),
    cpus=st.integers(1, 2),
    python=st.just("/p/python"),
    cache=st.sampled_from(["/c", "/d"]),
    devices=st.sampled_from([(), (Device(1, "GPU-a"),), (Device(1, "GPU-a", by_uuid=True),)]),
)
GRANTS = st.builds(
    Grant,
    job_id=st.sampled_from(["j_1", "j_2"]),
    attempt=st.integers(1, 2),
    name=st.sampled_from(["a", "b"]),
    scratch=st.sampled_from(["/s/1", "/s/2"]),
    outputs=st.sampled_from(["/s/1/work/outputs", "/s/2/work/outputs"]),
    share=SHARES,
)
ASKED = st.tuples(GRANTS, VARIABLES, VARIABLES, st.sampled_from([(), ("/n/lib",)]))


@given(st.lists(ASKED, min_size=1, max_size=8))
def test_an_environment_is_the_same_whichever_jobs_came_before(
    jobs: list[tuple[Grant, dict[str, str], dict[str, str], tuple[str, ...]]],
) -> None:
    anew = []
    for asked in jobs:
        grant_module._lasting.cache_clear()
        anew.append(job_environment(*asked))

    for asked, expected in zip(jobs, anew, strict=True):
        environment = job_environment(*asked)
        assert environment == expected
        environment.clear()
