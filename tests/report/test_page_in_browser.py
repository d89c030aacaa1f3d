"""The page in a real browser: everything is drawn, nothing overlaps, nothing is loaded, nothing is complained about."""

import json
import re
import shutil
import struct
import subprocess
import zlib
from html import escape, unescape

import numpy as np
import pytest

from farpipe.report.page import render, write_report
from farpipe.report.tables import TableView
from farpipe.report.views import RunReport
from report.steps import run_view

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--v=0"),
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed (looked for {', '.join(BROWSERS)})"),
]

# Looks at the page from outside, so that the page itself can keep its ban on scripts.
FRAME = '<iframe srcdoc="%s" style="border:0;display:block;width:%dpx;height:900px"></iframe>'
PROBE = """
<!doctype html><meta charset="utf-8"><body style="margin:0">
%s
<script>
function look(frame) {
  const page = frame.contentDocument, view = page.defaultView;
  const charts = [...page.querySelectorAll("svg.figure")].map(svg => {
    const frame = svg.getBoundingClientRect(), scale = frame.width / svg.viewBox.baseVal.width;
    const texts = [...svg.querySelectorAll("text")].map(text => {
      const box = text.getBoundingClientRect(), margin = box.height * 0.22;
      const name = text.lastChild.textContent;
      return {name, left: box.left, right: box.right, top: box.top + margin, bottom: box.bottom - margin};
    }).filter(text => text.right > text.left);
    const outside = texts.filter(text => text.left < frame.left - 1 || text.right > frame.right + 1 ||
                                         text.top < frame.top - 1 || text.bottom > frame.bottom + 1);
    const over = texts.flatMap((one, i) => texts.slice(i + 1).filter(other =>
      one.left < other.right - 0.5 && other.left < one.right - 0.5 && one.top < other.bottom && other.top < one.bottom
    ).map(other => one.name + " / " + other.name));
    const painted = [...svg.querySelectorAll("rect, path")].filter(shape => {
      const style = view.getComputedStyle(shape);
      return style.fill !== "none" || style.stroke !== "none";
    });
    return {name: svg.querySelector("title").textContent, width: frame.width, height: frame.height, scale,
            outside: outside.map(text => text.name), over, painted: painted.length, texts: texts.length};
  });
  const wide = [...page.querySelectorAll("body *")].filter(element => !element.closest(".scroll > *") &&
    element.getBoundingClientRect().right > view.innerWidth + 1).map(element => element.tagName);
  const cut = [...page.querySelectorAll(".scroll")].filter(element => element.scrollWidth > element.clientWidth + 1)
    .map(element => element.ariaLabel);
  const loaded = view.performance.getEntriesByType("resource").map(entry => entry.name);
  const ink = view.getComputedStyle(page.body).color, paper = view.getComputedStyle(page.body).backgroundColor;
  const plots = [...page.querySelectorAll("img")].filter(image => image.naturalWidth > 100).length;
  return {charts, plots, wide, cut, loaded, ink, paper};
}
addEventListener("load", () => {
  document.body.dataset.found = JSON.stringify([...document.querySelectorAll("iframe")].map(look));
});
</script>
"""


def browse(tmp_path, page, *options):
    """Output of the browser; fails if it does not end in time."""
    command = [BROWSER, *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def probe(tmp_path, pages, *options):
    """Findings of the probe in each of the `pages`, given as (report, width in pixels)."""
    frames = [FRAME % (escape(render(report)), width) for report, width in pages]
    page = tmp_path / "probe.html"
    page.write_text(PROBE % "\n".join(frames), encoding="utf-8")
    dom = browse(tmp_path, page, "--dump-dom", "--window-size=1300,900", *options).stdout
    return json.loads(unescape(re.search(r'data-found="([^"]*)"', dom)[1]))


def pixels(path):
    """An 8-bit RGB(A) PNG as an array [height, width, 3]."""
    data, at, body = path.read_bytes(), 8, b""
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        chunk = data[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, height, _, colours = struct.unpack_from(">IIBB", chunk)
        body += chunk if kind == b"IDAT" else b""
        at += size + 12
    channels = {2: 3, 6: 4}[colours]
    rows = np.frombuffer(zlib.decompress(body), np.uint8).reshape(height, 1 + width * channels)
    return unfilter(rows, channels).reshape(height, width, channels)[..., :3]


def unfilter(rows, step):
    """Undo the PNG filters: each byte was stored less its left, upper, mean or nearest (Paeth) neighbour."""
    above, image = np.zeros(rows.shape[1] - 1, np.uint8), []
    for row in rows:
        line = row[1:].copy()
        if row[0] == 2:
            line += above
        elif row[0]:
            unfilter_leftwards(int(row[0]), line, above, step)
        image.append(line)
        above = line
    return np.array(image)


def unfilter_leftwards(kind, line, above, step):
    out, up = line.tolist(), above.tolist()
    for i in range(len(out)):
        a, b, c = (out[i - step], up[i], up[i - step]) if i >= step else (0, up[i], 0)
        near = min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))[2]
        out[i] = (out[i] + (a if kind == 1 else (a + b) // 2 if kind == 3 else near)) % 256
    line[:] = out


LONG = "latency of lugano>zurich, after which several more words follow"
WIDE = TableView(
    "Strategies", ("strategy", "step", *"abcde", "limited by", "training"), (("one", *["1,234"] * 6, LONG, LONG),) * 3
)
REPORTS = {
    "2 ranks": RunReport(
        "Two ranks", (run_view(2, 8, "eager", 30), run_view(2, 8, "1f1b", 30)), "Two runs.", plan_tables=(WIDE,)
    ),
    "8 ranks": RunReport("Eight ranks", (run_view(8, 16, "1f1b", 30),)),
    "virtual stages": RunReport("Virtual stages", (run_view(4, 8, "interleaved", per_rank=2),)),
    "64 ranks": RunReport("Many ranks", (run_view(64, 128, "1f1b", 3),)),
    "1 rank": RunReport("One rank", (run_view(1, 1),)),
}


WIDTHS = {"phone": 390, "window": 900, "desk": 1200}
PAGES = [(name, width) for name in REPORTS for width in WIDTHS]


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """All pages in one start of the browser: what the probe found by (report, width)."""
    pages = [(REPORTS[name], WIDTHS[width]) for name, width in PAGES]
    return dict(zip(PAGES, probe(tmp_path_factory.mktemp("probe"), pages), strict=True))


@pytest.mark.parametrize(("name", "width"), PAGES)
def test_everything_is_drawn_and_no_text_overlaps(probed, name, width):
    found = probed[name, width]
    assert len(found["charts"]) >= 1
    assert len(found["charts"]) + found["plots"] >= 2
    for chart in found["charts"]:
        assert chart["over"] == [], chart["name"]
        assert chart["outside"] == [], chart["name"]
        assert chart["painted"] >= 2, chart["name"]
        assert chart["texts"] >= 4, chart["name"]
        assert chart["scale"] > 0.75, f"{chart['name']}: type would be too small to read"
    assert found["wide"] == []
    assert found["loaded"] == []
    assert width == "phone" or found["cut"] == [], "tables and whole steps fit without scrolling"


def test_light_and_dark_follow_the_reader(tmp_path):
    page = [(REPORTS["1 rank"], 600)]
    (light,) = probe(tmp_path, page, "--blink-settings=preferredColorScheme=1")
    (dark,) = probe(tmp_path, page, "--blink-settings=preferredColorScheme=0")
    assert (light["paper"], dark["paper"]) == ("rgb(255, 255, 255)", "rgb(20, 23, 28)")
    assert light["ink"] != dark["ink"]


def test_the_page_is_painted_and_the_browser_does_not_complain(tmp_path):
    page, picture = tmp_path / "report.html", tmp_path / "page.png"
    write_report(REPORTS["2 ranks"], page)
    done = browse(tmp_path, page, f"--screenshot={picture}", "--window-size=700,1800")
    assert "CONSOLE" not in done.stderr
    image = pixels(picture)
    assert image.shape == (1800, 700, 3)
    painted = {tuple(colour) for colour in np.unique(image.reshape(-1, 3), axis=0).tolist()}
    assert {(0x24, 0x65, 0xA8), (0xF0, 0xA3, 0x2E)} <= painted  # forwards and backwards
    assert 0.02 < (image != image[-1, -1]).any(axis=2).mean() < 0.6  # there is ink, and there is paper


def test_a_violation_of_the_ban_would_be_noticed(tmp_path):
    """The test above can fail: a page that wants to load something does make the browser complain."""
    page = tmp_path / "bad.html"
    text = render(REPORTS["1 rank"]).replace("<main>", '<main><img src="https://example.org/x.png"><script>1</script>')
    page.write_text(text, encoding="utf-8")
    done = browse(tmp_path, page, f"--screenshot={tmp_path / 'page.png'}", "--window-size=600,600")
    assert done.stderr.count("CONSOLE") >= 2
