"""The report as a browser shows it: nothing overflows, every chart is drawn, all text can be read, nothing is fetched.

Skipped where no Chromium is installed (Debian: apt-get install chromium).
"""

import html
import json
import re
import shutil
import subprocess

import pytest

from launch.report.data import collect
from launch.report.page import render
from tests.unit.report_run import CONFIG, make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT_S = 90

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")

LOOK = """
const luminance = (text) => {
  const parts = text.match(/[\\d.]+/g).map(Number);
  const [r, g, b] = parts.slice(0, 3).map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const isClear = (color) => color === "transparent" || /, 0\\)$/.test(color);
const behind = (element) => {
  for (let each = element; each; each = each.parentElement) {
    const color = getComputedStyle(each).backgroundColor;
    if (!isClear(color)) return color;
  }
  return "rgb(255, 255, 255)";
};
const ratio = (a, b) => {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};
const found = { low: [], texts: 0, charts: [], wide: [], tips: 0 };
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!own || element.closest("script, style, #tip, .skip") || !element.getClientRects().length) continue;
  const style = getComputedStyle(element);
  const isSvg = element.namespaceURI.endsWith("svg");
  if (element.localName === "title") continue;
  const ink = isSvg ? style.fill : style.color;
  const mark = element.classList.contains("onmark") ? element.previousElementSibling : null;
  const paper = mark ? getComputedStyle(mark).fill : behind(element);
  found.texts += 1;
  if (ratio(ink, paper) < 4.5) found.low.push([element.textContent.slice(0, 40), ink, paper, ratio(ink, paper)]);
}
for (const chart of document.querySelectorAll("svg.chart")) {
  const marks = [...chart.querySelectorAll(".line, .dot, .bar, .mark")];
  const drawn = marks.filter((mark) => { const box = mark.getBBox(); return box.width > 0 || box.height > 0; });
  const inks = drawn.map((mark) => getComputedStyle(mark)).map((style) => style.fill + style.stroke);
  found.charts.push([chart.getAttribute("aria-label"), drawn.length, inks.includes("rgb(0, 0, 0)none")]);
}
for (const element of document.querySelectorAll("main *, header *, footer *")) {
  if (element.closest(".scroll > *") || element.closest("svg")) continue;
  if (element.getBoundingClientRect().right > innerWidth + 0.5) found.wide.push(element.outerHTML.slice(0, 80));
}
for (const chart of document.querySelectorAll("svg[data-x]")) {
  chart.focus();
  chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  const text = document.getElementById("tip").textContent;
  if (/^(step|policy version|seconds since the run began) [\\d.,]+\\n/.test(text) && !/NaN/.test(text)) found.tips += 1;
  chart.blur();
}
found.width = innerWidth;
found.scroll = document.documentElement.scrollWidth;
found.dark = matchMedia("(prefers-color-scheme: dark)").matches;
found.resources = performance.getEntriesByType("resource").map((each) => each.name);
found.interactive = document.querySelectorAll("svg[data-x]").length;
found.title = document.title;
parent.postMessage(JSON.stringify(found), "*");
"""
WIDTHS = (1280, 390)
FRAMES = """<!doctype html><html style="color-scheme: light dark"><pre id="result"></pre>
<iframe src="page.html" style="width: 1280px; height: 900px; border: 0"></iframe>
<iframe src="page.html" style="width: 390px; height: 900px; border: 0"></iframe>
<script>
const all = [];
addEventListener("message", (event) => {
  all.push(event.data);
  if (all.length === 2) document.getElementById("result").textContent = `[${all.join()}]`;
});
</script>
"""
"""A window is never narrower than 500 px, and a frame is."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    long_name = "b" * 60  # has to break
    return [make_run(folder / "sums"), make_run(folder / long_name, config=CONFIG.replace("0.0001", "0.0003"))]


@pytest.fixture(scope="module", params=["one", "two", "broken"])
def page(request, runs, tmp_path_factory):
    if request.param == "broken":
        run = make_run(tmp_path_factory.mktemp("broken") / "sums", num_steps=3)
        run.status.unlink()
        (run.buffer / "data.mdb").unlink()
        return request.param, render([collect(run)])
    return request.param, render([collect(run) for run in runs[: 1 if request.param == "one" else 2]])


def look(page, folder, scheme):
    """What a browser of this colour scheme sees of a page at both widths, and what it complains about."""
    (folder / "page.html").write_text(page.replace("</body>", f"<script>{LOOK}</script></body>"))
    (folder / "frames.html").write_text(FRAMES)
    command = [
        CHROMIUM,
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
        *("--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND"),
        *("--enable-logging=stderr", "--v=0", f"--user-data-dir={folder / 'profile'}"),
        *("--window-size=1400,1000", f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"),
        *("--virtual-time-budget=4000", "--dump-dom", f"file://{folder / 'frames.html'}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    result = re.search(r'<pre id="result">(.+?)</pre>', done.stdout, flags=re.S)
    assert result is not None, done.stderr
    complaints = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return {each["width"]: each for each in json.loads(html.unescape(result.group(1)))}, complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_as_it_is_meant(page, tmp_path, scheme):
    which, text = page
    seen, complaints = look(text, tmp_path, scheme)
    assert complaints == []
    assert sorted(seen, reverse=True) == list(WIDTHS)
    for width, found in seen.items():
        assert found["resources"] == []
        assert found["dark"] == (scheme == "dark")
        assert found["title"].endswith("Leeway"), "a script of the run was run"
        assert found["wide"] == []
        assert found["scroll"] <= width
        assert found["texts"] > 100
        assert found["low"] == [], "text that is hard to read"
        assert len(found["charts"]) >= {"one": 16, "two": 20, "broken": 10}[which]
        for label, num_marks, has_no_style in found["charts"]:
            assert label
            assert num_marks > 0, f"nothing is drawn: {label}"
            assert not has_no_style, f"a mark without a colour of the page: {label}"
        assert found["tips"] == found["interactive"] >= 8, "the arrow keys show values"
