/* The part of the page that answers: legend, axis, charts, timelines. It is built from the data
   that stands in the page, and built again when `farandole watch` sends newer data. */

class Page {
  constructor(data) {
    this.data = data;
    this.hidden = new Set();
    this.axis = "time";
    this.charts = new Map();
    this.timelineOf = null;
    this.root = document.getElementById("charts");
    this.controls();
    this.update(data);
  }

  controls() {
    this.picker = this.root.querySelector("select.axis");
    this.picker.addEventListener("change", () => {
      this.axis = this.picker.value;
      for (const chart of this.charts.values()) chart.zoomTo(null);
    });
    this.logBox = this.root.querySelector("input.log");
    this.logBox.addEventListener("change", () => {
      for (const chart of this.charts.values()) {
        chart.log = this.logBox.checked;
        chart.zoomTo(null);
      }
    });
    this.legend = this.root.querySelector(".legend");
    this.panels = this.root.querySelector(".panels");
    this.timelines = this.root.querySelector(".timelines");
  }

  update(data) {
    this.data = data;
    this.fillAxes();
    this.fillLegend();
    this.fillPanels();
    this.fillTimelines();
    for (const chart of this.charts.values()) chart.draw();
  }

  fillAxes() {
    if (!this.data.axes.some((axis) => axis.key === this.axis)) this.axis = "time";
    this.picker.replaceChildren();
    for (const axis of this.data.axes) {
      const option = html("option", "", axis.title, this.picker);
      option.value = axis.key;
      option.selected = axis.key === this.axis;
    }
  }

  fillLegend() {
    this.legend.replaceChildren();
    for (const lane of this.data.lanes) {
      const entry = html("button", "entry", undefined, this.legend);
      entry.type = "button";
      entry.dataset.lane = lane.name;
      entry.setAttribute("aria-pressed", String(!this.hidden.has(lane.name)));
      entry.title = lane.problem || "click to hide or to show";
      const line = element("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, entry);
      const style = `stroke: var(--${lane.colour})`;
      element("path", { d: "M1 5h24", style, class: "lane", "stroke-dasharray": DASHES[lane.dash] }, line);
      html("span", "", lane.name, entry);
      if (lane.outcome !== "ok") html("span", `state ${lane.outcome}`, lane.outcome, entry);
      entry.addEventListener("click", () => this.toggle(lane.name, entry));
    }
  }

  toggle(name, entry) {
    const hide = !this.hidden.has(name);
    if (hide) this.hidden.add(name);
    else this.hidden.delete(name);
    entry.setAttribute("aria-pressed", String(!hide));
    for (const chart of this.charts.values()) chart.draw();
  }

  /* A panel stays as it is, with its zoom, when more of its data arrives. */
  fillPanels() {
    const wanted = new Set(this.data.panels.map((panel) => `${panel.kind} ${panel.key}`));
    for (const [key, chart] of this.charts) {
      if (!wanted.has(key)) { chart.host.parentElement.remove(); this.charts.delete(key); }
    }
    for (const panel of this.data.panels) {
      const key = `${panel.kind} ${panel.key}`;
      if (this.charts.has(key)) continue;
      const box = html("details", "panel", undefined, this.panels);
      box.open = panel.open;
      html("summary", "", panel.title, box);
      const host = html("div", "", undefined, box);
      host.id = `chart-${this.charts.size}-${this.panels.childElementCount}`;
      this.charts.set(key, new Chart(host, panel, this));
    }
  }

  fillTimelines() {
    const traced = this.data.lanes.filter((lane) => lane.timeline);
    this.timelines.hidden = traced.length === 0;
    if (!traced.length || this.timelineOf === traced.map((lane) => lane.name).join("\n")) return;
    this.timelineOf = traced.map((lane) => lane.name).join("\n");
    const opened = traced.find((lane) => lane.timeline.rows.length > 1) || traced[0];
    const places = this.timelines.querySelector(".places");
    places.replaceChildren();
    traced.forEach((lane, at) => {
      const box = html("details", "panel", undefined, places);
      box.open = lane === opened;
      html("summary", "", lane.name, box);
      const host = html("div", "", undefined, box);
      host.id = `timeline-${at}`;
      new Timeline(host, lane.timeline);
      for (const line of lane.timeline.waits) html("p", "note", line, box);
    });
  }
}

document.documentElement.classList.add("scripted");
const page = document.getElementById("charts")
  ? new Page(JSON.parse(document.getElementById("data").textContent)) : null;
