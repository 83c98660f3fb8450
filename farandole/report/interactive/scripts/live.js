/* Under `farandole watch`: newer data by server-sent events. The browser connects again by itself,
   and says with Last-Event-ID what it has. */

const live = document.getElementById("live");
if (live && page) {
  const state = live.querySelector(".state");
  const events = new EventSource(live.dataset.events);
  events.addEventListener("open", () => { state.textContent = "live"; state.className = "state running"; });
  events.addEventListener("error", () => { state.textContent = "not connected"; state.className = "state failed"; });
  events.addEventListener("state", (event) => {
    const sent = JSON.parse(event.data);
    document.title = sent.title;
    for (const [name, markup] of Object.entries(sent.sections)) {
      document.getElementById(`section-${name}`).innerHTML = markup;
    }
    page.update(sent.data);
    live.querySelector(".when").textContent = sent.when;
  });
  events.addEventListener("end", () => {
    events.close();
    state.textContent = "farandole watch has ended";
    state.className = "state stopped";
  });
}
