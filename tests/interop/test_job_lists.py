"""Lists of jobs as schedulers and published traces have them, with the columns that they document."""

import json
from zoneinfo import ZoneInfo

import pytest

from farpipe.core.errors import InputError
from farpipe.fleet.traces import read_jobs
from farpipe.interop.job_lists import as_trace, read_jobs_of

SACCT = """\
JobID|JobName|User|Account|Submit|End|State|ElapsedRaw|AllocTRES
101|pretrain|ada|vision|2024-07-01T12:00:00|2024-07-01T16:00:00|COMPLETED|10800|billing=64,cpu=64,gres/gpu:h100=16,gres/gpu=16,node=2
101.batch|batch||vision|2024-07-01T12:10:00|2024-07-01T16:00:00|COMPLETED|10800|cpu=32,gres/gpu=8,node=1
102_7|tune|bob|speech|2024-07-01T12:00:30|2024-07-01T13:00:00|CANCELLED by 1000|3000|cpu=8,gres/gpu:a100=4,gres/gpu:v100=2
103|etl|bob|speech|2024-07-01T12:00:31|2024-07-01T13:00:00|COMPLETED|3000|cpu=8,mem=8G
104|now|bob|speech|2024-07-01T12:00:32|Unknown|RUNNING|50|gres/gpu=8
105|gone|bob|speech|2024-07-01T12:00:33|2024-07-01T12:00:40|CANCELLED|0|gres/gpu=8
"""  # noqa: E501
POD = {"spec": {"containers": [{"resources": {"requests": {"nvidia.com/gpu": "8", "cpu": "4"}}}, {}]}}
KUEUE = {
    "apiVersion": "v1",
    "kind": "List",
    "items": [
        {
            "apiVersion": "kueue.x-k8s.io/v1beta1",
            "kind": "Workload",
            "metadata": {"name": "job-a", "namespace": "lab", "creationTimestamp": "2024-05-01T10:00:00Z"},
            "spec": {"queueName": "gpus", "podSets": [{"name": "main", "count": 4, "template": POD}]},
            "status": {
                "conditions": [
                    {"type": "QuotaReserved", "status": "True", "lastTransitionTime": "2024-05-01T10:05:00Z"},
                    {"type": "Admitted", "status": "True", "lastTransitionTime": "2024-05-01T10:06:00Z"},
                    {"type": "Finished", "status": "True", "lastTransitionTime": "2024-05-01T11:06:00Z"},
                ]
            },
        }
    ],
}
VOLCANO = {
    "apiVersion": "batch.volcano.sh/v1alpha1",
    "kind": "Job",
    "metadata": {"name": "job-v", "creationTimestamp": "2024-05-01T10:00:00Z"},
    "spec": {"queue": "research", "tasks": [{"replicas": 2, "template": POD}, {"replicas": 1, "template": POD}]},
    "status": {
        "conditions": [
            {"status": "Pending", "lastTransitionTime": "2024-05-01T10:00:01Z"},
            {"status": "Running", "lastTransitionTime": "2024-05-01T10:10:00Z"},
            {"status": "Completed", "lastTransitionTime": "2024-05-01T10:40:00Z"},
        ]
    },
}
SKYPILOT = [
    {
        "job_id": 7,
        "resources": "2x[H100:8]",
        "submitted_at": 1714557600.0,
        "end_at": 1714561300.0,
        "job_duration": 3600.0,
    },
    {"job_id": 8, "resources": "1x(gpus=A100:4, cpus=8+)", "submitted_at": 1714557610, "start_at": 1714557620}
    | {"end_at": 1714557720, "user_name": "ada"},
]

KUEUE_YAML = """\
apiVersion: v1
items:
- apiVersion: kueue.x-k8s.io/v1beta1
  kind: Workload
  metadata: {creationTimestamp: "2024-01-01T00:00:00Z", name: w, namespace: n}
  spec:
    podSets:
    - count: 2
      template: {spec: {containers: [{resources: {requests: {nvidia.com/gpu: "8"}}}]}}
    queueName: q
  status:
    conditions:
    - {lastTransitionTime: "2024-01-01T01:00:00Z", status: "True", type: Admitted}
    - {lastTransitionTime: "2024-01-01T02:00:00Z", status: "True", type: Finished}
kind: List
"""
SACCT_JSON = {
    "jobs": [
        {
            "job_id": 7,
            "account": "vision",
            "user": "ada",
            "time": {"submission": 1714557600, "start": 1714557700, "end": 1714561300, "elapsed": 3600},
            "tres": {
                "allocated": [
                    {"type": "cpu", "name": "", "count": 64},
                    {"type": "gres", "name": "gpu", "count": 16},
                    {"type": "gres", "name": "gpu:a100", "count": 16},
                ]
            },
        },
        {
            "job_id": 8,
            "account": "",
            "user": "bob",
            "time": {"submission": {"number": 1714557601}, "end": {"number": 0}, "elapsed": {"number": 5}},
            "tres": {"requested": [{"type": "gres", "name": "gpu", "count": {"number": 8}}]},
        },
    ]
}


def rows_of(tmp_path, content, name, zone="UTC"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    form, jobs = read_jobs_of(path, ZoneInfo(zone))
    text, notes = as_trace(jobs)
    return form, text.splitlines()[1:], notes


@pytest.mark.parametrize(
    ("content", "form", "rows"),
    [
        (SACCT, "Slurm's sacct", ["101,0.0,10800.0,16,vision", "102_7,30.0,3000.0,6,speech"]),
        (KUEUE, "Kueue", ["lab/job-a,0.0,3600.0,32,gpus"]),
        (VOLCANO, "Volcano", ["default/job-v,0.0,1800.0,24,research"]),
        (SKYPILOT, "SkyPilot", ["7,0.0,3600.0,16,", "8,10.0,100.0,4,ada"]),
        (KUEUE_YAML, "Kueue", ["n/w,0.0,3600.0,16,q"]),
        (SACCT_JSON, "Slurm's sacct", ["7,0.0,3600.0,16,vision"]),
    ],
)
def test_a_list_of_jobs_becomes_a_trace_that_a_fleet_reads(tmp_path, content, form, rows):
    found = rows_of(tmp_path, content, "list.txt")
    assert found[:2] == (form, rows)
    path = tmp_path / "jobs.csv"
    path.write_text("job,submit_s,duration_s,devices,tenant\n" + "\n".join(rows))
    assert len(read_jobs(path)) == len(rows)


def test_what_is_left_out_is_counted_and_the_clock_is_told(tmp_path):
    notes = rows_of(tmp_path, SACCT, "jobs.txt", "Europe/Zurich")[2]
    assert notes[0] == 'second 0 is [clock] start = "2024-07-01T10:00:00" (UTC)'
    assert notes[1:] == [
        "1 jobs without devices: left out",
        "1 jobs that have not ended, or have no times: left out",
        "1 jobs that never ran: left out",
    ]


def test_jobs_that_end_before_they_begin_are_left_out_and_counted(tmp_path):
    rows, notes = rows_of(tmp_path, SACCT.replace("|10800|", "|-10800|"), "jobs.txt")[1:]
    assert rows == ["102_7,0.0,3000.0,6,speech"]
    assert "1 jobs that end before they begin: left out" in notes


def test_lines_of_sacct_with_a_bar_at_the_end_and_days_are_read(tmp_path):
    text = "JobID|Submit|End|Elapsed|ReqTRES|\n1|2024-01-01T00:00:00|2024-01-03T01:02:03|2-01:02:03|gres/gpu=8|\n"
    assert rows_of(tmp_path, text, "jobs.txt")[1] == ["1,0.0,176523.0,8,"]


@pytest.mark.parametrize(
    ("resources", "num_devices"),
    [
        ("2x[H100:8]", 16),
        ("1x[A100]", 1),
        ("1x[CPU:4+]", 0),
        ("1x[CPU:4+, Mem:8+]", 0),
        ("2x[CPU:2+, A100:4]", 8),
        ("1x(gpus=A100-80GB:8, ...)", 8),
        ("1x(n1-standard-8, cpus=8)", 0),
        ("2x AWS(p4d.24xlarge, {'A100': 8})", 16),
        ("3x[tpu-v3-8]", 3),
        ("1x[A100:0.5]", 1),
        ("-", 0),
    ],
)
def test_accelerators_of_skypilot_are_no_cores(tmp_path, resources, num_devices):
    (tmp_path / "jobs.json").write_text(json.dumps([SKYPILOT[0] | {"resources": resources}]))
    assert read_jobs_of(tmp_path / "jobs.json")[1][0].num_devices == num_devices


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        ("nvidia.com/gpu", 24),
        ("huawei.com/Ascend910", 24),
        ("habana.ai/gaudi", 24),
        ("aws.amazon.com/neuron", 24),
        ("nvidia.com/mig-1g.5gb", 24),
        ("volcano.sh/vgpu-number", 24),
        ("volcano.sh/vgpu-memory", 0),
        ("huawei.com/Ascend910-memory", 0),
        ("memory", 0),
    ],
)
def test_devices_of_any_vendor_count_and_their_memory_does_not(tmp_path, name, num_devices):
    (tmp_path / "jobs.json").write_text(json.dumps(VOLCANO).replace("nvidia.com/gpu", name))
    assert read_jobs_of(tmp_path / "jobs.json")[1][0].num_devices == num_devices


def test_raw_ids_and_gres_of_older_slurm_are_read(tmp_path):
    head = "JobIDRaw|Submit|End|ElapsedRaw|AllocGRES\n"
    line = "1|2024-01-01T00:00:00|2024-01-01T01:00:00|3600|gpu:a100:8(S:0-1),craynetwork:1\n"
    assert rows_of(tmp_path, head + line, "jobs.txt")[1] == ["1,0.0,3600.0,8,"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("JobID|State\n1|FAILED\n", "line 1: Submit, End, ElapsedRaw and AllocTRES are needed, found JobID, State"),
        (SACCT.replace("2024-07-01T12:00:00", "yesterday"), "line 2: Submit: expected a time"),
        (SACCT.replace("|10800|", "|long|", 1), "line 2: ElapsedRaw: expected a number, found 'long'"),
        (SACCT.replace("gres/gpu=16", "gres/gpu=N/A"), "line 2: AllocTRES: expected a number"),
        (SACCT.replace("102_7|", "101|"), "job '101' is there twice"),
        ("JobID|Submit|End|ElapsedRaw|AllocTRES\n", "no job that ran on devices"),
        ('{"apiVersion": "v1", "items": [], "kind": "List"}', "no job that ran on devices"),
        ([SKYPILOT[0], {"submitted_at": 1}], r"\[1\]: looks like a record of SkyPilot, but has a different structure"),
        (SACCT + "106|cut|ada\n", "line 8: expected 9 columns, found 3"),
        (SACCT.replace("|pretrain|", "|pre|train|"), "line 2: expected 9 columns, found 10"),
        (SACCT.replace("2024-07-01T12:00:00", "9999-12-31T23:59:59-10:00"), "line 2: Submit: expected a time"),
        ([SKYPILOT[0] | {"job_duration": "long"}], r"\[0\]: job_duration: expected a number, found 'long'"),
        (KUEUE | {"items": 7}, "items: expected a list, found 7"),
    ],
)
def test_what_is_wrong_with_a_list_of_jobs_is_named(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        rows_of(tmp_path, content, "jobs.txt")


@pytest.mark.parametrize(
    "text",
    ["job,submit_s\n", "[1, 2]", '{"items": []}', "JobID\n", "apiVersion: batch.volcano.sh/v1alpha1\nkind: Job\n"],
)
def test_other_files_are_no_lists_of_jobs(tmp_path, text):
    (tmp_path / "other").write_text(text)
    assert read_jobs_of(tmp_path / "other") is None
    assert read_jobs_of(tmp_path / "absent") is None


POD = {"spec": {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": 8}}}]}}
LAUNCHER = {"spec": {"containers": [{"name": "l"}]}}
ENDED = {"startTime": "2030-01-01T00:00:00Z", "completionTime": "2030-01-01T01:00:00Z"}
RAY = {
    "headGroupSpec": {"template": LAUNCHER},
    "workerGroupSpecs": [{"replicas": 2, "numOfHosts": 2, "template": POD}, {"replicas": 1, "template": POD}],
}


def record(kind, spec, name="j", status=ENDED, **meta):
    meta = {"name": name, "namespace": "lab", "creationTimestamp": "2030-01-01T00:00:00Z"} | meta
    return {"apiVersion": "x/v1", "kind": kind, "metadata": meta, "spec": spec, "status": status}


def replicated(replicas, parallelism):
    return {"name": "w", "replicas": replicas, "template": {"spec": {"parallelism": parallelism, "template": POD}}}


@pytest.mark.parametrize(
    ("kind", "spec", "num_devices"),
    [
        ("JobSet", {"replicatedJobs": [replicated(4, 4)]}, 128),
        (
            "JobSet",
            {"replicatedJobs": [replicated(2, 1), replicated(1, 3), {"template": {"spec": {"template": POD}}}]},
            48,
        ),
        (
            "PyTorchJob",
            {"pytorchReplicaSpecs": {"Master": {"template": POD}, "Worker": {"replicas": 3, "template": POD}}},
            32,
        ),
        (
            "MPIJob",
            {"mpiReplicaSpecs": {"Launcher": {"template": LAUNCHER}, "Worker": {"replicas": 2, "template": POD}}},
            16,
        ),
        ("Job", {"parallelism": 4, "completions": 4, "template": POD}, 32),
        ("Job", {"template": POD}, 8),
        ("RayJob", {"rayClusterSpec": RAY}, 40),
    ],
)
@pytest.mark.parametrize("as_list", [True, False])
def test_records_of_kubernetes_count_all_their_pods(kind, spec, num_devices, as_list, tmp_path):
    data = record(kind, spec)
    listed = {"apiVersion": "v1", "kind": "List", "items": [data]}
    _, rows, notes = rows_of(tmp_path, listed if as_list else data, "x.json")
    assert rows == [f"lab/j,0.0,3600.0,{num_devices},lab"]
    assert not any("left out" in note for note in notes)


def test_a_jobset_without_a_start_counts_from_its_creation(tmp_path):
    ended = {"conditions": [{"type": "Completed", "status": "True", "lastTransitionTime": "2030-01-01T02:00:00Z"}]}
    resumed = {"type": "Suspended", "status": "False", "lastTransitionTime": "2030-01-01T00:30:00Z"}
    items = [
        record("JobSet", {"replicatedJobs": [replicated(1, 1)]}, "a", ended),
        record("JobSet", {"replicatedJobs": [replicated(1, 1)]}, "b", {"conditions": [*ended["conditions"], resumed]}),
    ]
    _, rows, notes = rows_of(tmp_path, {"apiVersion": "v1", "kind": "List", "items": items}, "x.json")
    assert [line.split(",")[2] for line in rows] == ["7200.0", "5400.0"]
    assert "1 jobs without a start time: assumed to start when created" in notes


def test_kinds_that_are_not_read_are_named_and_nothing_counts_twice(tmp_path):
    owner = [{"kind": "JobSet", "name": "a"}]
    items = [
        record("JobSet", {"replicatedJobs": [replicated(1, 2)]}, "a"),
        record("Job", {"template": POD}, "a-w-0", ownerReferences=owner),
        record("RayCluster", RAY, "r"),
        record("Pod", POD["spec"], "p"),
        record("Pod", POD["spec"], "q"),
    ]
    _, rows, notes = rows_of(tmp_path, {"apiVersion": "v1", "kind": "List", "items": items}, "x.json")
    assert rows == ["lab/a,0.0,3600.0,16,lab"]
    assert {note for note in notes if "left out" in note} == {
        "1 jobs that are in the list twice: left out",
        "1 jobs of a kind that is not read (RayCluster): left out",
        "2 jobs of a kind that is not read (Pod): left out",
    }
    moments = {"Admitted": "2030-01-01T00:15:00Z", "Finished": "2030-01-01T01:00:00Z"}
    queued = {
        "conditions": [{"type": name, "status": "True", "lastTransitionTime": at} for name, at in moments.items()]
    }
    workload = record("Workload", {"podSets": [{"count": 2, "template": POD}]}, "w", queued, ownerReferences=owner)
    _, rows, _ = rows_of(tmp_path, {"apiVersion": "v1", "kind": "List", "items": [items[0], workload]}, "x.json")
    assert rows == ["lab/w,0.0,2700.0,16,lab"]  # its admission is known


@pytest.mark.parametrize("count", ["half", -1, 2.5, None, [], {}])
def test_a_count_that_is_none_is_named(count, tmp_path):
    data = record("JobSet", {"replicatedJobs": [replicated(1, count)]})
    with pytest.raises(InputError, match=r"x\.json"):
        rows_of(tmp_path, data, "x.json")


@pytest.mark.parametrize("key", ["submission", "attempts", "submitted_at", "kind", "apiVersion"])
def test_one_key_makes_no_list_of_jobs(key, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({key: 7, "the": 1}))
    assert read_jobs_of(tmp_path / "x.json") is None
