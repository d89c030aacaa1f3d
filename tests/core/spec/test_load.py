"""Reading job.toml: what it means, and what is said about mistakes."""

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec import LocalLink, load_job, parse_job, preset_device
from job_files import PLAIN, added, changed

RACKS = ("gb200", "GB300", "gb300-nvl72")


def test_presets_units_and_defaults_become_a_job_in_si_units():
    job = parse_job(PLAIN)
    assert (job.model.name, job.model.num_layers, job.model.num_kv_heads) == ("llama-3-8b", 32, 8)
    assert job.cluster.sites[0].device == preset_device("h100-sxm")
    assert job.cluster.sites[0].machine_link == LocalLink(latency_s=3.4e-6, bandwidth_bytes_per_s=450e9)
    assert job.cluster.sites[0].site_link.bandwidth_bytes_per_s == 50e9
    assert [site.devices_per_machine for site in job.cluster.sites] == [8, 8]
    assert (job.training.precision, job.training.clip_norm, job.data.source) == ("bf16", 1.0, "stdlib")
    assert job.schedule is None


def test_a_symmetric_link_is_two_directed_ones():
    first, second = parse_job(PLAIN).cluster.links
    assert (first.source, first.target) == (second.target, second.source) == ("zurich", "lugano")
    assert first.latency_s == second.latency_s == 0.006
    assert first.bandwidth_bytes_per_s == second.bandwidth_bytes_per_s == 12.5e9


def test_a_directed_link_leaves_the_other_direction_alone():
    job = parse_job(changed(('between = ["zurich", "lugano"]', 'from = "lugano"\nto = "zurich"')))
    assert [link.name for link in job.cluster.links] == ["lugano>zurich"]


def test_explicit_figures_override_those_of_presets():
    job = parse_job(
        changed(
            ('preset = "llama-3-8b"', 'preset = "llama-3-8b"\nnum_layers = 16\nname = "half"'),
            ('device = "h100"', 'device = { preset = "h100", memory = "40 GiB", peak = { fp32 = "1 TFLOP/s" } }'),
            (
                "num_devices = 8",
                'num_devices = 8\nmachine_link = { bandwidth = "32 GB/s" }\nsite_link = "ethernet-100g"',
            ),
            ('latency = "6 ms"\nbandwidth = "100 Gbit/s"', 'preset = "across-atlantic"\nlatency = "45 ms"'),
        )
    )
    site = job.cluster.sites[0]
    assert (job.model.name, job.model.num_layers, job.model.hidden) == ("half", 16, 4096)
    assert site.device.memory_bytes == 40 * 2**30
    assert site.device.peak_flops == preset_device("h100").peak_flops | {"fp32": 1e12}
    assert site.machine_link == LocalLink(latency_s=3.4e-6, bandwidth_bytes_per_s=32e9)
    assert site.site_link.bandwidth_bytes_per_s == 12.5e9
    assert job.cluster.links[0].latency_s == 0.045
    assert job.cluster.links[0].bandwidth_bytes_per_s == 0.6e9


def test_a_device_may_be_given_without_a_preset():
    device = '{ name = "own", peak = { bf16 = "1 PFLOP/s" }, memory = "96 GB", memory_bandwidth = "4 TB/s" }'
    links = 'machine_link = { latency = "2 us", bandwidth = "200 GB/s" }'
    site = parse_job(changed(('device = "h100"', f"device = {device}\n{links}"))).cluster.sites[0]
    assert (site.device.name, site.device.peak_flops, site.device.power_w) == ("own", {"bf16": 1e15}, None)
    assert site.machine_link == LocalLink(latency_s=2e-6, bandwidth_bytes_per_s=200e9)


@pytest.mark.parametrize(("num_devices", "devices_per_machine"), [(1, 1), (4, 4), (8, 8), (12, 8), (16, 8), (13, 8)])
def test_machines_have_eight_devices_and_the_last_may_have_fewer(num_devices, devices_per_machine):
    job = parse_job(changed(("num_devices = 8", f"num_devices = {num_devices}")))
    assert job.cluster.sites[0].devices_per_machine == devices_per_machine
    assert parse_job(job.model_copy(update={"text": ""}).to_toml()).cluster == job.cluster


@pytest.mark.parametrize(("num_devices", "joined"), [(16, 16), (72, 72), (144, 72), (512, 64), (74, 37), (73, 8)])
def test_nvlink_joins_the_devices_of_a_rack(num_devices, joined):
    texts = [changed(('"h100"', f'"{name}"'), ("num_devices = 8", f"num_devices = {num_devices}")) for name in RACKS]
    assert {parse_job(text).cluster.sites[0].devices_per_machine for text in texts} == {joined}
    small = texts[0].replace(f"num_devices = {num_devices}", f"num_devices = {num_devices}\ndevices_per_machine = 1")
    assert parse_job(small).cluster.sites[0].devices_per_machine == 1


def test_clipping_is_switched_off_with_the_word_none():
    assert parse_job(added("training", 'clip_norm = "none"')).training.clip_norm is None


def test_a_missing_link_is_no_error():
    text = PLAIN[: PLAIN.index("[[cluster.links]]")]
    assert parse_job(text).cluster.links == ()


def test_more_devices_pinned_than_there_are_is_for_the_planner_to_tell():
    assert parse_job(added("layout", "pipeline = 4\ntensor = 8")).layout.tensor == 8


def test_auto_leaves_the_order_to_the_planner():
    assert parse_job(added("schedule", 'method = "auto"')).schedule is None
    assert parse_job(added("schedule", 'method = "1f1b"')).schedule == "1f1b"


def test_local_runs_on_the_cpu_device():
    cpu = [('preset = "llama-3-8b"', 'preset = "tiny"'), ('device = "h100"', 'device = "cpu"')] * 2
    text = changed(*cpu[:2], cpu[3], ("global_batch = 256", 'global_batch = 256\nprecision = "fp32"'))
    assert {site.device.name for site in parse_job(text).cluster.sites} == {"cpu"}


MISTAKES = [
    # what is written, the key path and what is said about it
    (changed(("[model]", "[modell]")), "modell: unknown key; did you mean 'model'?"),
    (
        changed(('preset = "llama-3-8b"', 'presett = "llama-3-8b"')),
        "model.presett: unknown key; did you mean 'preset'?",
    ),
    (changed(('"llama-3-8b"', '"lama-3-8b"')), "model.preset: there is no model 'lama-3-8b' in the catalogue; did you"),
    (added("model", "hiden = 4096"), "model.hiden: unknown key; did you mean 'hidden'?"),
    (changed(('preset = "llama-3-8b"', "hidden = 4096")), "model.num_layers: missing"),
    (added("model", "num_kv_heads = 5"), "model.num_kv_heads: 5 does not divide num_heads 32"),
    (added("model", "num_layers = 0"), "model.num_layers: input should be greater than or equal to 1, found 0"),
    (added("model", "vocab_size = 255"), "model.vocab_size: 255 is less than the 256 values of a byte"),
    (added("training", "betas = [0.9, 1.0]"), "training.betas[1]: must be less than 1, found 1.0"),
    (added("training", "learning_rate = -1"), "training.learning_rate: must be more than 0, found -1"),
    (added("training", "learning_rate = nan"), "training.learning_rate: expected a finite number, found nan"),
    (added("training", "microbatch_size = 3"), "training.microbatch_size: 3 does not divide global_batch 256"),
    (
        added("training", 'precision = "fp8"'),
        'training.precision: fp8 is for products alone; set matmul = "fp8" and precision = "bf16"',
    ),
    (
        added("training", 'precision = "fp64"'),
        "training.precision: input should be 'bf16', 'fp16' or 'fp32', found 'fp64'",
    ),
    (added("training", 'seed = "1"'), "training.seed: input should be a valid integer, found '1'"),
    (added("training", "clip_norm = 0"), "training.clip_norm: must be more than 0, found 0"),
    (
        changed(('"h100"', '"h1000"')),
        "cluster.sites[0].device.preset: there is no device 'h1000' in the catalogue; did",
    ),
    (changed(('"h100"', "5")), "cluster.sites[0].device: expected a table, found 5"),
    (changed(("[[cluster.links]]", "[cluster.links]")), "cluster.links: expected a list, found a table"),
    (
        added("training", "recompute = true"),
        "training.recompute: expected 'auto', 'none', 'full', 'op', 'selective' or some of core_attn, layernorm",
    ),
    (added("training", "betas = [0.9, 0.9, 0.9]"), "training.betas: expected 2 entries, found a list of 3"),
    (
        changed(('"h100"', '"v100"')),
        "cluster.sites[0].device: v100-16gb has no rate for bf16 (training.precision), only",
    ),
    (
        changed(('"h100"', '"a100"'), ("[training]", '[training]\nmatmul = "fp8"')),
        "cluster.sites[0].device: a100-80gb has no rate for fp8 (training.matmul); set training.matmul to 'same', or",
    ),
    (
        added("training", 'matmul = "fp8_rowwise"\nfp8_param_gather = true'),
        "training.fp8_param_gather: TorchAO has it not with a scale for every row; leave it out, or set matmul = 'fp8'",
    ),
    (
        added("training", 'matmul = "nvfp4"'),
        "cluster.sites[0].device: h100-sxm has no rate for nvfp4 (training.matmul); set training.matmul to "
        "'same' or 'fp8' or 'fp8_rowwise', or choose a device that has nvfp4",
    ),
    (added("layout", "context = 3"), "layout.context: 3 does not divide training.sequence_length 4096; 2 and 4 would"),
    (
        changed(('"h100"', '{ preset = "h100", memory = "80 Gib" }')),
        "cluster.sites[0].device.memory: unknown unit 'Gib'",
    ),
    (
        changed(('"h100"', '{ preset = "h100", memory = 80 }')),
        "cluster.sites[0].device.memory: expected a quantity with",
    ),
    (changed(('"h100"', '{ preset = "h100", memory = "0 GiB" }')), "cluster.sites[0].device.memory: must be more than"),
    (
        changed(('"h100"', '{ preset = "h100", memmory = "8 GiB" }')),
        "cluster.sites[0].device.memmory: unknown key; did",
    ),
    (
        changed(('"h100"', '{ preset = "h100", peak = { fp4 = "1 TFLOP/s" } }')),
        "cluster.sites[0].device.peak.fp4: input",
    ),
    (
        changed(('"h100"', '{ memory = "80 GiB" }')),
        "cluster.sites[0].device.name: missing; give it, or a preset that has",
    ),
    (
        changed(('"zurich"', '"zu>rich"')),
        "cluster.sites[0].name: a site's name is letters, digits, '_', '-' and '.', found",
    ),
    (changed(('name = "lugano"', 'name = "zurich"')), "cluster.sites[1].name: there is already a site called 'zurich'"),
    (changed(("num_devices = 8", "num_devices = 0")), "cluster.sites[0].num_devices: input should be greater than or"),
    (
        changed(("num_devices = 8", "num_devices = 8\ndevices_per_machine = 3")),
        "cluster.sites[0].devices_per_machine: 3",
    ),
    (
        changed(("num_devices = 8", 'num_devices = 8\nmachine_link = "nvlnk"')),
        "cluster.sites[0].machine_link.preset: there is no link 'nvlnk' in the catalogue; known: ",
    ),
    (
        changed(
            (
                '"h100"',
                '{ name = "x", peak = { bf16 = "1 PFLOP/s" }, memory = "80 GB", memory_bandwidth = "1 TB/s" }',
            )
        ),
        "cluster.sites[0].machine_link.latency: missing; give it, or a preset that has it",
    ),
    (
        changed(('["zurich", "lugano"]', '["zurich", "lugno"]')),
        "cluster.links[0]: there is no site 'lugno'; did you mean",
    ),
    (changed(('["zurich", "lugano"]', '["zurich", "zurich"]')), "cluster.links[0]: 'zurich' is linked with itself"),
    (changed(('["zurich", "lugano"]', '["zurich"]')), "cluster.links[0].between[1]: missing"),
    (changed(("between = [", "betwen = [")), "cluster.links[0].betwen: unknown key; did you mean 'between'?"),
    (changed(("between = [", 'from = "zurich"\nbetween = [')), "cluster.links[0]: give either between = "),
    (changed(('between = ["zurich", "lugano"]', 'from = "zurich"')), "cluster.links[0]: give either between = "),
    (changed(('"6 ms"', "6")), 'cluster.links[0].latency: expected a quantity with its unit such as "35 ms", found 6'),
    (changed(('"6 ms"', '"-6 ms"')), "cluster.links[0].latency: must be finite and not negative, found '-6 ms'"),
    (changed(('"100 Gbit/s"', '"100 Gb/s"')), "cluster.links[0].bandwidth: unknown unit 'Gb/s' in '100 Gb/s'; did you"),
    (changed(('"100 Gbit/s"', '"0 Gbit/s"')), "cluster.links[0].bandwidth: must be more than zero, found '0 Gbit/s'"),
    (changed(('"6 ms"', '"1e16 s"')), "cluster.links[0].latency: a link's latency is at most an hour, found '1e16 s'"),
    (changed(('"100 Gbit/s"', '"1e-300 bit/s"')), "cluster.links[0].bandwidth: a bandwidth is from 8 bit/s (1 B/s) to"),
    (changed(("num_devices = 8", "num_devices = 1000000000")), "cluster.sites[0].num_devices: input should be less"),
    (
        changed(("num_devices = 8", 'num_devices = 8\nsite_link = { latency = "2 h" }')),
        "cluster.sites[0].site_link.latency: a link's latency is at most an hour, found '2 h'",
    ),
    (
        changed(("num_devices = 8", 'num_devices = 8\nregion = "aws:us-est-1"')),
        "cluster.sites[0].region: there is no region 'aws:us-est-1' in the catalogue; did you mean 'aws:us-",
    ),
    (
        changed(("num_devices = 8", "num_devices = 8\nprices = { pue = 0.5 }")),
        "cluster.sites[0].prices.pue: a site draws at least what its devices draw: from 1 to 10, found 0.5",
    ),
    (
        changed(("num_devices = 8", "num_devices = 8\nprices = { rent_usd_per_device_hour = -1 }")),
        "cluster.sites[0].prices.rent_usd_per_device_hour: ",
    ),
    (
        changed(('bandwidth = "100 Gbit/s"\n', "")),
        "cluster.links[0].bandwidth: missing; give it, or a preset that has it",
    ),
    (
        PLAIN + '[[cluster.links]]\nfrom = "lugano"\nto = "zurich"\npreset = "same-region"\n',
        "cluster.links[1]: the link from 'lugano' to 'zurich' is given twice",
    ),
    (added("layout", 'sites = ["zurch"]'), "layout.sites[0]: there is no site 'zurch'; did you mean 'zurich'?"),
    (added("layout", 'sites = ["zurich", "zurich"]'), "layout.sites[1]: 'zurich' is given twice"),
    (
        added("layout", 'sites = ["zurich", "lugano"]\npipeline = 1'),
        "layout.sites: 2 sites can't share 1 pipeline ranks",
    ),
    (added("layout", "layers = [16, 15]"), "layout.layers: they sum to 31, the model has 32 layers"),
    (added("layout", "layers = [16, 0, 16]"), "layout.layers: only the first and the last stage may have no layer"),
    (
        added("layout", "layers = [16, 16]\npipeline = 4"),
        "layout.layers: a list of 2 does not fit pipeline x virtual = 4",
    ),
    (
        added("layout", "layers = [16, 16]\npipeline = 1\nvirtual = 1"),
        "layout.layers: a list of 2 does not fit pipeline x",
    ),
    (
        added("layout", "pipeline = 8\nvirtual = 5"),
        "layout.pipeline: 40 stages (pipeline x virtual) are too many for 32",
    ),
    (added("layout", "tensor = 3"), "layout.tensor: 3 does not divide model.num_heads 32; 1, 2, 4, 8, 16, 32 would"),
    (added("layout", "data = 3"), "training.global_batch: 256 is no multiple of layout.data = 3; 255 and 258 would be"),
    (
        added("layout", "data = 2\nnum_microbatches = 64").replace("= 256", "= 256\nmicrobatch_size = 1"),
        "training.global_batch: 256 is not training.microbatch_size x layout.data x layout.num_microbatches",
    ),
    (added("schedule", "metod = 1"), "schedule.metod: unknown key; did you mean 'method'?"),
    (PLAIN[: PLAIN.index("[[cluster")] + "[cluster]\nsites = []\n", "cluster.sites: expected 1 or more entries"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_mistake_is_told_with_file_key_path_value_and_the_nearest_good_word(text, message):
    with pytest.raises(InputError) as error:
        parse_job(text, "my/job.toml")
    assert str(error.value).startswith(f"my/job.toml: {message}")
    assert error.value.exit_code == 3
    assert "\n" not in str(error.value)


def test_a_memory_that_cannot_hold_one_layer_is_told_with_both_sizes():
    with pytest.raises(InputError) as error:
        parse_job(
            changed(
                ('"llama-3-8b"', '"llama-3-405b"'),
                ('"h100"', '{ preset = "h100", memory = "4 GiB" }'),
                ("global_batch = 256", "global_batch = 256\nzero = 0"),
            )
        )
    assert str(error.value) == (
        "job.toml: cluster.sites[0].device: h100-sxm has 4 GiB, which can't hold one layer: parameters, gradients and "
        "optimizer state are 5.94 GiB on each of 8 devices (line 11)"
    )


def test_a_layer_may_be_divided_over_a_machine_and_its_optimizer_state_over_replicas():
    small = changed(('"llama-3-8b"', '"llama-3-405b"'), ('"h100"', '{ preset = "h100", memory = "4 GiB" }'))
    parse_job(small.replace("global_batch = 256", "global_batch = 256\nzero1 = true"))
    parse_job(small)  # the planner may divide it
    whole = small.replace("global_batch = 256", "global_batch = 256\nzero = 0")
    parse_job(whole.replace("num_devices = 8", "num_devices = 16\ndevices_per_machine = 16"))
    with pytest.raises(InputError, match="on each of 1 devices"):
        parse_job(whole.replace("[layout]", "[layout]\ntensor = 1").replace("4 GiB", "40 GiB"))


def test_a_site_that_the_pins_leave_out_need_not_fit():
    text = changed(('"h100"', '"v100"')).replace("[layout]", '[layout]\nsites = ["lugano"]')
    assert [site.name for _, site in parse_job(text).used_sites()] == ["lugano"]


def test_learned_positions_bound_the_sequence():
    with pytest.raises(InputError, match=r"training.sequence_length: 4096 is more than the 2048 learned positions"):
        parse_job(changed(('"llama-3-8b"', '"gpt3-6.7b"')))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n\t ", "the file is empty"),
        (b"\xff\xfe[\x00m", "not UTF-8 text (byte 0)"),
        (PLAIN.encode("utf-16"), "not UTF-8 text (byte 0)"),
        (PLAIN.encode()[:25], "not TOML: "),
        (b"[model]\n[model]\n", "not TOML: "),
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b"a = " + b"9" * 10_000, "Exceeds the limit"),
        (b"[model]\nnum_layers = 0x" + b"f" * 10_000, "model.num_layers: input should be less than or equal to"),
        (b"x = 1979-05-27T07:32:00Z", "x: unknown key; known here: "),
        (b'"[key]" = 1', "[key]: unknown key"),
        (b"\x00", "not TOML: "),
    ],
)
def test_a_broken_file_is_told_by_name(tmp_path, content, message):
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        load_job(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert len(str(error.value)) < 400


def test_a_missing_file_and_a_folder_are_told_by_name(tmp_path):
    with pytest.raises(InputError, match="can't be read: No such file"):
        load_job(tmp_path / "absent.toml")
    with pytest.raises(InputError, match="can't be read: Is a directory"):
        load_job(tmp_path)


def test_a_little_of_the_memory_is_reserved_unless_the_site_says_otherwise():
    usual = parse_job(PLAIN).cluster.sites[0]
    assert usual.memory_reserve_bytes == min(2.5 * 2**30, usual.device.memory_bytes / 16)
    assert usual.plannable_bytes == usual.device.memory_bytes - usual.memory_reserve_bytes
    own = parse_job(changed(("num_devices = 8\n", 'num_devices = 8\nmemory_reserve = "2 GiB"\n'))).cluster.sites[0]
    assert own.memory_reserve_bytes == 2 * 2**30
    with pytest.raises(InputError, match=r"memory_reserve: .* leaves nothing of the device's"):
        parse_job(changed(("num_devices = 8\n", 'num_devices = 8\nmemory_reserve = "80 GiB"\n')))
