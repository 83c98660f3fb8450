/* A frame with two axes: zoom by dragging, values under the pointer. What is drawn in it is a
   subclass's: `extent(x0, x1)`, of that part or of all, `marks(layer)`, `nearest(x, y)`. */

const SVG_NAMESPACE = document.querySelector("svg").namespaceURI;
const SMALLEST_DRAG = 8;

function element(tag, attributes, parent) {
  const made = document.createElementNS(SVG_NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (parent) parent.append(made);
  return made;
}

function html(tag, className, text, parent) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

class Plot {
  constructor(host, title, height) {
    this.host = host;
    this.title = title;
    this.height = height;
    this.zoom = null;
    this.margin = { left: 56, right: 14, top: 10, bottom: 40 };
    host.replaceChildren();
    host.classList.add("plot");
    this.svg = element("svg", { role: "img", "aria-label": title }, host);
    this.tip = html("div", "tip", "", host);
    this.tip.hidden = true;
    this.reset = html("button", "reset", "reset zoom", host);
    this.reset.type = "button";
    this.reset.hidden = true;
    this.reset.addEventListener("click", () => this.zoomTo(null));
    this.listen();
    let width = 0;
    new ResizeObserver(() => {
      if (host.clientWidth && host.clientWidth !== width) {
        width = host.clientWidth;
        this.draw();
      }
    }).observe(host);
  }

  /* Scales from values to pixels and back; `log`: whether the vertical one is logarithmic. */
  scales() {
    const all = this.extent();
    const area = this.zoom || all;
    const { left, right, top, bottom } = this.margin;
    const width = Math.max(40, this.host.clientWidth - left - right);
    const height = this.height - top - bottom;
    const up = all.log ? Math.log10 : (value) => value;
    const down = all.log ? (value) => Math.pow(10, value) : (value) => value;
    const low = up(area.y0), high = up(area.y1);
    const spanX = area.x1 - area.x0 || 1, spanY = high - low || 1;
    return {
      area, width, height, log: all.log,
      x: (value) => left + ((value - area.x0) / spanX) * width,
      y: (value) => top + height - ((up(value) - low) / spanY) * height,
      valueX: (pixel) => area.x0 + ((pixel - left) / width) * spanX,
      valueY: (pixel) => down(low + ((top + height - pixel) / height) * spanY),
    };
  }

  draw() {
    if (!this.host.clientWidth) return;
    const scale = (this.scale = this.scales());
    this.svg.setAttribute("viewBox", `0 0 ${this.host.clientWidth} ${this.height}`);
    this.svg.setAttribute("height", this.height);
    this.svg.replaceChildren();
    const { left, top } = this.margin;
    const clip = `clip-${this.host.id}`;
    const area = { x: left, y: top - 6, width: scale.width + 8, height: scale.height + 12 };
    element("rect", area, element("clipPath", { id: clip }, element("defs", {}, this.svg)));
    this.axes(scale);
    const layer = element("g", { "clip-path": "url(#" + clip + ")" }, this.svg);
    this.marks(layer, scale);
    this.spot = element("circle", { r: 5, class: "spot", visibility: "hidden" }, this.svg);
    this.frame = element("rect", { class: "drag", visibility: "hidden" }, this.svg);
    this.tip.hidden = true;
  }

  axes(scale) {
    const { left, top } = this.margin;
    const bottom = top + scale.height;
    const across = Math.max(2, Math.floor(scale.width / 90));
    for (const tick of this.xTicks(scale.area.x0, scale.area.x1, across)) {
      const x = scale.x(tick);
      element("line", { x1: x, x2: x, y1: top, y2: bottom, class: "grid" }, this.svg);
      const label = element("text", { x, y: bottom + 17, class: "tick middle" }, this.svg);
      label.textContent = this.xText(tick);
    }
    for (const [value, text] of this.yMarks(scale)) {
      const y = scale.y(value);
      element("line", { x1: left, x2: left + scale.width, y1: y, y2: y, class: "grid" }, this.svg);
      element("text", { x: left - 7, y: y + 4, class: "tick end" }, this.svg).textContent = text;
    }
    const name = element("text", { x: left + scale.width / 2, y: this.height - 5, class: "name middle" }, this.svg);
    name.textContent = this.xName();
  }

  yMarks(scale) {
    const ticks = scale.log ? logTicks : linearTicks;
    const found = ticks(scale.area.y0, scale.area.y1, Math.max(3, Math.floor(scale.height / 40)));
    return found.map((tick) => [tick, this.yText(tick)]);
  }

  listen() {
    const at = (event) => {
      const box = this.svg.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    let begin = null;
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      begin = at(event);
    });
    this.svg.addEventListener("pointermove", (event) => {
      const here = at(event);
      if (begin && (event.buttons & 1 || event.pointerType === "touch")) this.showDrag(begin, here);
      else this.showTip(...here);
    });
    this.svg.addEventListener("pointerup", (event) => {
      const from = begin;
      begin = null;
      this.frame.setAttribute("visibility", "hidden");
      if (from) this.endDrag(from, at(event));
    });
    for (const name of ["pointerleave", "pointercancel"]) {
      this.svg.addEventListener(name, () => {
        begin = null;
        if (this.frame) this.frame.setAttribute("visibility", "hidden");
        this.hideTip();
      });
    }
    this.svg.addEventListener("dblclick", () => this.zoomTo(null));
  }

  showDrag(from, to) {
    this.hideTip();
    const { top } = this.margin;
    const tall = this.isBox(from, to);
    for (const [name, value] of Object.entries({
      x: Math.min(from[0], to[0]), width: Math.abs(from[0] - to[0]),
      y: tall ? Math.min(from[1], to[1]) : top,
      height: tall ? Math.abs(from[1] - to[1]) : this.scale.height,
      visibility: "visible",
    })) this.frame.setAttribute(name, value);
  }

  /* A drag that is about horizontal chooses a part of the horizontal axis alone. */
  isBox(from, to) { return Math.abs(from[1] - to[1]) > 24; }

  endDrag(from, to) {
    const { scale } = this;
    if (Math.abs(from[0] - to[0]) < SMALLEST_DRAG) return this.showTip(...to);
    const values = [scale.valueX(from[0]), scale.valueX(to[0])].sort((a, b) => a - b);
    const x0 = Math.max(scale.area.x0, values[0]), x1 = Math.min(scale.area.x1, values[1]);
    const heights = [scale.valueY(from[1]), scale.valueY(to[1])].sort((a, b) => a - b);
    const fit = this.extent(x0, x1);
    const [y0, y1] = this.isBox(from, to) ? heights : [fit.y0, fit.y1];
    this.zoomTo({ x0, x1, y0, y1 });
  }

  zoomTo(area) {
    if (area && !(area.x1 > area.x0 && area.y1 > area.y0)) return;
    this.zoom = area;
    this.reset.hidden = area === null;
    this.draw();
  }

  showTip(x, y) {
    const found = this.scale && this.nearest(x, y);
    if (!found) return this.hideTip();
    this.tip.replaceChildren();
    found.lines.forEach((line, index) => html(index ? "div" : "strong", "", line, this.tip));
    this.tip.hidden = false;
    if (!found.plain) {
      this.spot.setAttribute("cx", found.x);
      this.spot.setAttribute("cy", found.y);
      this.spot.setAttribute("visibility", "visible");
    }
    const room = this.host.clientWidth - this.tip.offsetWidth - 4;
    const beside = found.x + 14 > room ? found.x - this.tip.offsetWidth - 14 : found.x + 14;
    this.tip.style.left = Math.max(4, Math.min(room, beside)) + "px";
    this.tip.style.top = Math.max(0, found.y - this.tip.offsetHeight - 10) + "px";
  }

  hideTip() {
    this.tip.hidden = true;
    if (this.spot) this.spot.setAttribute("visibility", "hidden");
  }
}
