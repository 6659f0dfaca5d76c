"""The page of `shardspec explore` in a real browser, held against the library."""

import math
from itertools import pairwise

import pytest
from click.testing import CliRunner

from shardspec import DeviceMesh, Layout, LayoutConverter
from shardspec.boxes import box_size
from shardspec.cli.main import cli
from shardspec.explorer import all_layouts, count_conversions, models_of
from shardspec.layout.moving import transfers_of
from shardspec.layout.plan import step_text
from shardspec.layout.search import naive_plan
from shardspec.text import bytes_text, seconds_text
from tests.explorer.browser import Browser

in_browser = pytest.mark.compat

MESHES = {
    "4": DeviceMesh(range(4), (4,)),
    "2x3": DeviceMesh(range(6), (2, 3)),
    "dp=2,tp=4": DeviceMesh(range(8), (2, 4), axis_names=("dp", "tp")),
}
SHAPES = ("4096x4096", "7x5", "64")
LINKS = ("h100-nvswitch", "ib-ndr-per-gpu,h100-nvswitch")
DTYPE = "bfloat16"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("explore") / "page.html"
    args = ["explore", "-o", str(path), "--dtype", DTYPE]
    for option, values in (("--mesh", MESHES), ("--shape", SHAPES), ("--links", LINKS)):
        for value in values:
            args += [option, value]
    done = CliRunner().invoke(cli, args)
    assert done.exit_code == 0, done.output
    size = bytes_text(path.stat().st_size)
    shown = "4, 2x3, dp=2,tp=4"
    assert done.output == f"{path}: every conversion on {shown}, {size}; open it\n"
    # Compact: 4,142 conversions, with up to five plans each, in half a megabyte.
    assert path.stat().st_size < 600_000
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def page(path, browser):
    """Yield the browser with the page open; afterwards nothing was fetched and nothing is wrong."""
    browser.requests.clear()
    browser.open(path.as_uri())
    yield browser
    assert [url for url in browser.requests if not url.startswith("data:")] == [path.as_uri()]
    assert browser.complaints == []


def pick(page, name, label):
    """Choose an option of a select by what it is called."""
    found = page.ask(
        f"""(() => {{
            const select = document.getElementById({name!r});
            const at = [...select.options].findIndex((each) => each.text === {label!r});
            if (at < 0 || select.options[at].disabled) return false;
            select.selectedIndex = at;
            select.dispatchEvent(new Event("change", {{ bubbles: true }}));
            return true;
        }})()"""
    )
    assert found, (name, label)


def text(page, selector):
    return page.ask(f"document.querySelector({selector!r}).innerText")


def texts(page, selector):
    return page.ask(
        f"[...document.querySelectorAll({selector!r})]"
        ".map((each) => (each.innerText ?? each.textContent).trim())"
    )


def plan_of(mesh, shape, links, source, target):
    model = models_of(MESHES[mesh], [tuple(links.split(","))])[links]
    layout = Layout(MESHES[mesh], source, tuple(map(int, shape.split("x"))), DTYPE)
    plans = LayoutConverter(model).alternatives(layout, target, 4)
    return plans, naive_plan(layout, layout.with_spec(target), model)


@in_browser
@pytest.mark.parametrize(
    ("mesh", "shape", "links", "source", "target"),
    [
        ("dp=2,tp=4", "4096x4096", LINKS[1], "[S(tp,dp),R]", "[R,S(tp)]"),
        ("dp=2,tp=4", "7x5", LINKS[0], "[S(dp),R|P(tp)]", "[R,S(dp,tp)]"),
        ("2x3", "7x5", LINKS[1], "[R,R|P0,P1]", "[R,S0|P1]"),
        ("2x3", "64", LINKS[1], "[S01]", "[S10]"),
        ("4", "7x5", LINKS[0], "[S0,R]", "[R,S0]"),
        ("4", "4096x4096", LINKS[0], "[S0,R]", "[S0,R]"),
    ],
)
def test_what_is_picked_is_shown_as_the_library_has_it(page, mesh, shape, links, source, target):
    layout = Layout(MESHES[mesh], source, tuple(map(int, shape.split("x"))), DTYPE)
    labels = [str(each.labelled_spec) for each in (layout, layout.with_spec(target))]
    pick(page, "mesh", mesh)
    pick(page, "shape", f"{shape.replace('x', '×')} {DTYPE}")
    pick(page, "links", links)
    pick(page, "source", labels[0])
    pick(page, "target", labels[1])
    plans, naive = plan_of(mesh, shape, links, source, target)
    best = plans[0]
    assert text(page, "[data-fact=time]") == seconds_text(best.cost_seconds)
    assert text(page, "[data-fact=received]") == bytes_text(best.bytes_received)
    assert text(page, "[data-fact=peak]") == bytes_text(best.peak_bytes)
    shown = text(page, "[data-fact=naive]").split()
    assert shown[:2] == seconds_text(naive.cost_seconds).split()
    rows = texts(page, "#plans tbody tr td:nth-child(4)")
    assert rows[: len(plans)] == [seconds_text(plan.cost_seconds) for plan in plans]
    peaks = texts(page, "#plans tbody tr td:nth-child(7)")
    assert peaks[: len(plans)] == [bytes_text(plan.peak_bytes) for plan in plans]
    # The naive plan comes last, where it is none of these.
    if len(rows) > len(plans):
        last = seconds_text(naive.cost_seconds), bytes_text(naive.peak_bytes)
        assert (rows[-1], peaks[-1]) == last
        assert texts(page, "#plans label")[-1] == f"{len(rows)}. (naive)"
    assert text(page, "#plans .picked label").startswith("cheapest")
    stations = [str(each.labelled_spec) for each in best.layouts]
    assert texts(page, "#route .at") == stations
    names = [step_text(step) for step in best.steps]
    assert [each.split(" over ")[0] for each in texts(page, "#route .step span")] == names
    assert texts(page, "#route .step small") == [
        f"{seconds_text(seconds)} · receives {bytes_text(received)} · holds {bytes_text(live)}"
        for seconds, received, live in zip(
            best.step_seconds, best.step_bytes, best.live_bytes, strict=True
        )
    ]


@in_browser
def test_every_number_of_the_page_is_the_librarys(page):
    """All pairs of layouts of all meshes, tensors and links, pending sums included."""
    shown = page.ask(
        """tables.meshes.map((mesh, m) => mesh.tensors.map((tensor, t) => mesh.links.map((_, l) => {
            Object.assign(state, { mesh: m, shape: t, links: l });
            return tensor.specs.map((_, source) => tensor.specs.map((_, target) =>
                entry(source, target) === null ? null : plansOf(source, target).map(
                    ({ time, received, peak, specs }) => [time, received, peak, specs])));
        })))"""
    )
    count = 0
    for mesh, of_mesh in zip(MESHES.values(), shown, strict=True):
        models = models_of(mesh, [tuple(names.split(",")) for names in LINKS])
        for shape, of_shape in zip(SHAPES, of_mesh, strict=True):
            layouts = all_layouts(mesh, tuple(map(int, shape.split("x"))), DTYPE)
            for model, of_model in zip(models.values(), of_shape, strict=True):
                converter = LayoutConverter(model)
                for source, row in zip(layouts, of_model, strict=True):
                    for target, plans in zip(layouts, row, strict=True):
                        if not set(target.spec.partials) <= set(source.spec.partials):
                            assert plans is None
                            continue
                        best = converter.plan(source, target)
                        time, received, peak, specs = plans[0]
                        assert time == pytest.approx(best.cost_seconds, rel=1e-12, abs=0)
                        assert (received, peak) == (best.bytes_received, best.peak_bytes)
                        assert [layouts[number] for number in specs] == list(best.layouts)
                        # The cheapest first; every move counts a little more in the search.
                        for less, more in pairwise(plan[0] for plan in plans[:4]):
                            assert less <= more + 5e-12
                        count += 1
    # One axis, then two axes twice with two choices of links.
    of_one, of_two = (
        2 * count_conversions(axes, 2) + count_conversions(axes, 1) for axes in (1, 2)
    )
    assert count == of_one + 2 * 2 * of_two


def held(page):
    """Return the box that is drawn for each device, in shares of the tensor."""
    return page.ask(
        """[...document.querySelectorAll("#still .device")].map((card) => {
            const number = (each, name) => Number(each.getAttribute(name));
            const whole = card.querySelector(".whole");
            const box = card.querySelector(".edge");
            return box && [number(box, "y") / number(whole, "height"),
                (number(box, "y") + number(box, "height")) / number(whole, "height"),
                number(box, "x") / number(whole, "width"),
                (number(box, "x") + number(box, "width")) / number(whole, "width")];
        })"""
    )


@in_browser
def test_boxes_are_drawn_where_they_are_and_move_to_where_they_go(page):
    pick(page, "mesh", "2x3")
    pick(page, "shape", f"7×5 {DTYPE}")
    pick(page, "source", "[S01,R]")
    pick(page, "target", "[R,S0]")
    plans, _ = plan_of("2x3", "7x5", LINKS[0], "[S01,R]", "[R,S0]")
    pick(page, "links", LINKS[0])
    plan = plans[0]
    assert len(plan.steps) > 1
    for number, layout in enumerate(plan.layouts):
        page.ask(f"jump({number})")
        boxes = list(layout.boxes().values())
        for box, drawn in zip(boxes, held(page), strict=True):
            if box_size(box) == 0:
                assert drawn is None
                continue
            (top, bottom), (left, right) = box
            assert drawn == pytest.approx([top / 7, bottom / 7, left / 5, right / 5])
        written = texts(page, "#still .device text.soft")
        assert written == [
            "[" + ", ".join(f"{lo}:{hi}" for lo, hi in box) + "]" if box_size(box) else "nothing"
            for box in boxes
        ]
    for number, (step, (before, after)) in enumerate(
        zip(plan.steps, pairwise(plan.layouts), strict=True)
    ):
        wanted = sorted(
            [copy.sender, device]
            for device in before.mesh.ids
            for copy in transfers_of(step, before, after).of(device).incoming
            if box_size(copy.box)
        )
        page.ask(f"jump({number} + 0.5)")
        moving = page.ask(
            "[...document.getElementById('moving').children]"
            ".map((each) => [Number(each.dataset.from), Number(each.dataset.to)])"
        )
        assert sorted(moving) == wanted
        page.ask(f"jump({number})")
        traveling = [pair for pair in wanted if pair[0] != pair[1]]
        assert page.ask("document.querySelectorAll('#arrows path').length") == len(traveling)


@in_browser
def test_hands_on_keys_alone(page):
    page.ask("document.getElementById('source').focus()")
    before = page.ask("state.source")
    page.press("ArrowUp")
    assert page.ask("state.source") == before - 1
    page.ask("document.activeElement.blur()")
    # Motion is not wanted, so each step is there at once.
    page(
        "Emulation.setEmulatedMedia",
        features=[{"name": "prefers-reduced-motion", "value": "reduce"}],
    )
    steps = page.ask("plan().moves.length")
    assert steps >= 1
    for number in range(1, steps + 1):
        page.press("ArrowRight")
        assert page.ask("state.at") == number
    assert text(page, "#caption").startswith("Arrived: this is ")
    page.press("ArrowLeft")
    assert page.ask("state.at") == steps - 1
    # Everything that can be done has a control that the tab key comes to.
    picks = ["mesh", "shape", "links", "source", "target", "swap"]
    for name in [*picks, "back", "play", "forward", "position", "follow"]:
        page.ask(f"document.getElementById({name!r}).focus()")
        disabled = page.ask(f"document.getElementById({name!r}).disabled")
        assert disabled or page.ask("document.activeElement.id") == name
    page("Emulation.setEmulatedMedia", features=[])


@in_browser
def test_every_conversion_is_reached_by_keys(page):
    pick(page, "mesh", "2x3")
    pick(page, "shape", f"7×5 {DTYPE}")
    specs = page.ask("tensor().specs")
    focused = "document.activeElement.dataset.pair"
    label = "document.activeElement.getAttribute('aria-label')"
    pick(page, "source", "[S01,R]")
    pick(page, "target", "[R,R]")
    # One cell is on the way of the tab key: that of what is picked.
    assert page.ask("document.querySelectorAll('#matrix [tabindex=\"0\"]').length") == 1
    page.ask("document.querySelector('#matrix [tabindex=\"0\"]').focus()")
    row, column = specs.index("[S01,R]"), 0
    assert page.ask(focused) == f"{row},{column}"
    for key, down, right in (("ArrowRight", 0, 1), ("ArrowRight", 0, 1), ("ArrowUp", -1, 0)):
        page.press(key)
        row, column = row + down, column + right
        assert page.ask(focused) == f"{row},{column}"
        time = page.ask(f"secondsText(plansOf({row}, {column})[0].time)")
        assert page.ask(label) == f"{specs[row]} → {specs[column]}: {time}" == text(page, "#looked")
        # The ring around it lies where the cell does.
        ring = page.ask(
            """(() => {
                const [a, b] = [document.activeElement, document.querySelector("#matrix .looked")]
                    .map((each) => each.getBoundingClientRect());
                return [b.x <= a.x, b.y <= a.y, b.right >= a.right, b.bottom >= a.bottom,
                    getComputedStyle(document.querySelector("#matrix .looked")).display];
            })()"""
        )
        assert ring == [True, True, True, True, "inline"]
    # Nothing is picked by looking; steps of the plan do not move meanwhile.
    assert page.ask("[state.source, state.target, state.at]") == [specs.index("[S01,R]"), 0, 0]
    page.press("Enter")
    assert page.ask("[state.source, state.target]") == [row, column]
    assert page.ask(focused) == f"{row},{column}"
    assert page.ask("document.activeElement.getAttribute('aria-selected')") == "true"
    # Ways that do not exist are passed over, and the edges hold.
    page.press("Home")
    assert page.ask(focused) == f"{row},0"
    page.press("ArrowLeft")
    assert page.ask(focused) == f"{row},0"
    page.press("End")
    end = page.ask(focused)
    assert int(end.split(",")[1]) == max(
        at for at in range(len(specs)) if page.ask(f"entry({row}, {at}) !== null")
    )
    cells = page.ask("[...document.querySelectorAll('#matrix [role=gridcell]')].length")
    pairs = page.ask("tensor().plans[0].flat().filter((each) => each !== null).length")
    assert cells == pairs
    page.ask("document.activeElement.blur()")
    assert text(page, "#looked") == ""


@in_browser
def test_the_largest_mesh(browser, tmp_path):
    """As many devices as there may be; their arrows are too many to show all."""
    path = tmp_path / "large.html"
    args = ["explore", "-o", str(path), "--mesh", "32", "--shape", "64x64", "--links", "unit"]
    assert CliRunner().invoke(cli, args).exit_code == 0
    browser.requests.clear()
    browser.open(path.as_uri())
    assert browser.complaints == []
    pick(browser, "source", "[S0,R]")
    pick(browser, "target", "[R,S0]")
    assert browser.ask("document.querySelectorAll('#still .device').length") == 32
    assert browser.ask("piecesOf(plan().moves[0]).length") == 32 * 32
    assert browser.ask("document.querySelectorAll('#arrows path').length") == 2 * 31
    assert text(browser, "#moved").startswith("992 boxes move; arrows are those of device 0 alone.")
    browser.ask("jump(0.5)")
    assert browser.ask("document.querySelectorAll('#moving > g').length") == 32 * 32
    pick(browser, "follow", "device 31")
    browser.ask("jump(0)")
    assert browser.ask("document.querySelectorAll('#arrows path').length") == 2 * 31
    assert text(browser, "#moved").startswith("Device 31 holds [62:64, 0:64]; it gets [0:2, 62:64]")
    assert browser.complaints == []


@in_browser
def test_a_plan_is_played_until_it_is_paused(page):
    page("Emulation.setEmulatedMedia", features=[])
    steps = page.ask("plan().moves.length")
    assert steps > 1
    page.ask("play()")
    assert text(page, "#play") == "❚❚ Pause"
    moving = """new Promise((done) => {
        const look = () => (state.at > 0.3 ? done(state.at) : requestAnimationFrame(look));
        look();
    })"""
    assert 0.3 < page.ask(moving) < steps
    page.ask("play()")
    assert text(page, "#play") == "▶ Play"
    stopped = page.ask("state.at")
    page.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.ask("state.at") == stopped
    # A step forward ends where the next layout is reached.
    page.ask("forward()")
    page.ask(moving.replace("0.3", str(math.ceil(stopped) - 1e-9)))
    assert page.ask("state.at") == math.ceil(stopped)


@in_browser
def test_every_control_says_what_it_is(page):
    unnamed = page.ask(
        """[...document.querySelectorAll("select, input, button")]
            .filter((each) => !(each.labels?.length || each.innerText || each.ariaLabel))
            .map((each) => each.outerHTML)"""
    )
    assert unnamed == []
    assert page.ask("document.querySelectorAll('select, input, button').length") > 15


@in_browser
def test_a_link_leads_to_what_was_picked(page, path):
    pick(page, "mesh", "2x3")
    pick(page, "source", "[R,S10]")
    pick(page, "target", "[S1,R]")
    page.ask("pickPlan(1)")
    address = page.ask("location.href")
    shown = texts(page, "#route button")
    page.open(address)
    assert texts(page, "#route button") == shown
    assert page.ask("state.plan") == 1
    page.requests[:] = [path.as_uri()]


# Of all text with what is behind it, as the accessibility guidelines define it.
CONTRASTS = """(() => {
    const linear = (p) => (p <= 0.04045 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4);
    const light = (color) => {
        const [r, g, b] = color.match(/[0-9.]+/g).map((part) => linear(part / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (each) => {
        const color = getComputedStyle(each).backgroundColor;
        return color === "rgba(0, 0, 0, 0)" ? behind(each.parentElement) : light(color);
    };
    const kinds = "h1, h2, p, dt, dd, th, td, label, button:enabled, select, small, code";
    return [...document.querySelectorAll(kinds)]
        .filter((each) => each.innerText)
        .map((each) => [light(getComputedStyle(each).color), behind(each)].sort((a, b) => b - a))
        .map(([more, less]) => (more + 0.05) / (less + 0.05));
})()"""


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_in_light_and_in_dark(page, scheme):
    page("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    contrasts = page.ask(CONTRASTS)
    assert len(contrasts) > 30
    assert min(contrasts) > 4.5
    page("Emulation.setEmulatedMedia", features=[])


@in_browser
def test_numbers_are_written_as_the_library_writes_them(page):
    sizes = [0, 1, 1023, 1024, 1536, 12928, 12938, 10**7, 2**40, 2**50 + 2**39, 3 * 2**60]
    sizes += [math.prod((n, n, 3)) for n in range(1, 4000, 37)]
    times = [0, 1e-12, 9.9999e-4, 1e-3, 0.5, 1, 75.125, 12345.0, 1e6, 2.5e-5, 1.5e-10, 9.99951e-7]
    times += [n / 1024 / 1024 for n in range(1, 3000, 31)]
    assert page.ask(f"{sizes}.map(bytesText)") == [bytes_text(size) for size in sizes]
    assert page.ask(f"{times}.map(secondsText)") == [seconds_text(time) for time in times]
