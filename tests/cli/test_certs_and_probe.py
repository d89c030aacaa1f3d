import json
import stat
import sys

import pytest
from cryptography import x509

from farpipe.core.errors import InputError
from farpipe.core.spec import load_cluster
from farpipe.engine.transport.link_probe import ProbeServer, Sides
from farpipe.engine.transport.security.authority import init, issue
from farpipe.engine.transport.security.tls import TlsFiles
from job_files import cluster_text

CLUSTER = f"# measured by us\n{cluster_text()}"


@pytest.fixture
def certs(farpipe, tmp_path):
    folder = tmp_path / "certs"
    assert "valid until" in farpipe("certs", "init", folder).stdout
    for site in ("zurich", "lugano"):
        assert "copy this folder to the site" in farpipe("certs", "issue", folder, site).stdout
    return folder


def test_certificates_are_made_and_keys_kept(certs):
    for site in ("zurich", "lugano"):
        files = TlsFiles.find(certs / site, site)
        assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
        files.context(server=True)
    assert stat.S_IMODE((certs / "authority.key").stat().st_mode) == 0o600


def test_a_certificate_is_limited_to_names_and_addresses(farpipe, certs):
    farpipe("certs", "issue", certs, "zurich", "--host", "a.example", "--host", "10.0.0.1", "--host", "::1")
    made = x509.load_pem_x509_certificate(TlsFiles.find(certs / "zurich", "zurich").certificate.read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "a.example" in names.get_values_for_type(x509.DNSName)
    assert {str(one) for one in names.get_values_for_type(x509.IPAddress)} == {"10.0.0.1", "::1"}


@pytest.mark.parametrize("make", [init, lambda folder: issue(folder, "zurich")], ids=["init", "issue"])
def test_without_the_library_for_certificates_the_remedy_is_named(make, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(InputError, match=r"need the cryptography library: pip install 'farpipe\[secure\]'"):
        make(tmp_path)


def test_a_second_authority_in_one_place_is_refused(farpipe, certs):
    result = farpipe("certs", "init", certs)
    assert result.returncode == 3
    assert "has an authority already" in result.stderr


@pytest.mark.slow
def test_a_link_is_measured_and_written(farpipe, certs, tmp_path):
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    server = ProbeServer("127.0.0.1", 0, Sides(TlsFiles.find(certs / "lugano", "lugano"), b""))
    try:
        options = ["--certs", certs / "zurich", "--seconds", "0.2", "--json"]
        write = ["zurich>lugano", "--write", cluster]
        run = farpipe("probe", f"127.0.0.1:{server.port}", *options, *write)
        assert run.returncode == 0, run.stderr
        found = json.loads(run.stdout)
    finally:
        server.close()
    written = load_cluster(cluster)
    there, back = written.link("zurich", "lugano"), written.link("lugano", "zurich")
    assert there.bandwidth_bytes_per_s == pytest.approx(found["there"], rel=1e-3)
    assert back.bandwidth_bytes_per_s == pytest.approx(found["back"], rel=1e-3)
    assert there.latency_s == back.latency_s == pytest.approx(found["round_trip_s"] / 2, rel=1e-3)
    assert cluster.read_text().startswith("# measured by us")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "expected HOST:PORT, such as 10.0.0.2:29600, found 'nowhere'"),
        (["10.0.0.1:99999"], "expected HOST:PORT"),
        (["10.0.0.1:29600"], "give this site's certificates with --certs"),
        (["127.0.0.1:29600"], "give the --token that the listening side shows"),
        (["127.0.0.1:29600", "--token", ""], "give the --token that the listening side shows"),
        (["127.0.0.1:29600", "zurich>lugano"], "--write and LINK go together"),
        (
            ["127.0.0.1:29600", "--token", "x", "--message", "8 MB,1"],
            'expected a quantity with its unit such as "100 ms"',
        ),
        (["127.0.0.1:29600", "--listen", "--seconds", "1"], "--seconds is for the side that measures"),
    ],
)
def test_a_probe_that_makes_no_sense_is_refused(farpipe, arguments, message):
    result = farpipe("probe", *arguments)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("source", "target", "code", "message"),
    [
        ("zurich", "lugno", 3, "LINK: cluster.toml has no site 'lugno'; did you mean 'lugano'?; it has zurich, lugano"),
        ("zurich", "zurich", 2, "expected two sites such as 'zurich>lugano', found 'zurich>zurich'"),
    ],
)
def test_sites_for_a_link_are_checked_before_anything_is_measured(farpipe, tmp_path, source, target, code, message):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    where = (f"{source}>{target}", "--write", "cluster.toml")
    run = farpipe("probe", "127.0.0.1:1", "--token", "x", *where)
    assert (run.returncode, run.stdout) == (code, "")
    assert message in run.stderr


@pytest.mark.parametrize("name", ["a/b", "-rf", "..", ".", "a b", ""])
def test_a_certificate_is_only_for_what_can_be_a_site(farpipe, certs, tmp_path, name):
    before = sorted(certs.rglob("*"))
    result = farpipe("certs", "issue", certs, "--", name)
    assert result.returncode == 3
    assert "a site's name is letters, digits" in result.stderr
    assert sorted(certs.rglob("*")) == before
