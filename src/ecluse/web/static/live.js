// Shows beside the heading whether the page is updated live, does not reconnect a stream after its "end" event, asks again
// for a stream that a limit refused, updates elapsed and remaining times every second, writes instants in the reader's
// time zone, and applies filters at once.
const ended = new WeakSet();
const ahead = Date.parse(document.body.dataset.now) - Date.now(); // server clock minus browser clock
const two = (number) => String(number).padStart(2, "0");
const lasted = (seconds) => {
  const minutes = Math.floor(seconds / 60);
  const hours = Math.floor(minutes / 60);
  if (minutes < 1) return `${seconds} s`;
  if (hours < 1) return `${minutes} min ${two(seconds % 60)} s`;
  return hours < 48 ? `${hours} h ${two(minutes % 60)} min` : `${Math.floor(hours / 24)} d ${two(hours % 24)} h`;
};
const tick = () => {
  const now = Date.now() + ahead;
  for (const one of document.querySelectorAll(".ticks")) {
    const { since, until } = one.dataset;
    const seconds = Math.max(0, Math.floor((since ? now - Date.parse(since) : Date.parse(until) - now) / 1000));
    const text = since ? lasted(seconds) : seconds ? `in ${lasted(seconds)}` : "now";
    if (one.textContent !== text) one.textContent = text;
  }
};
tick();
setInterval(tick, 1000);
const { timeZone } = Intl.DateTimeFormat().resolvedOptions();
const local = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium", timeZone });
const localise = () => {
  if (timeZone === "UTC") return;
  for (const one of document.querySelectorAll("time[datetime]")) {
    const text = local.format(new Date(one.dateTime));
    if (one.textContent === text) continue;
    one.title = `${one.dateTime.replace("T", " ").replace("Z", "")} UTC`;
    one.textContent = text;
  }
};
localise();
const zone = document.getElementById("zone");
if (zone && timeZone !== "UTC") {
  zone.textContent = timeZone;
  document.getElementById("zone-note").hidden = false;
}
document.addEventListener("htmx:after:swap", () => (tick(), localise()));
for (const form of document.querySelectorAll('form[aria-label="Filter"]')) {
  form.addEventListener("formdata", ({ formData }) => {
    for (const [name, value] of [...formData]) if (!value) formData.delete(name);
  });
  form.addEventListener("change", ({ target }) => {
    sessionStorage.setItem("filtered", target.name);
    form.requestSubmit();
  });
  const last = sessionStorage.getItem("filtered");
  if (last) form.elements[last]?.focus({ preventScroll: true });
  sessionStorage.removeItem("filtered");
}
const say = (state, text) => {
  const pulse = document.getElementById("pulse");
  pulse.hidden = !text;
  pulse.dataset.state = state;
  pulse.textContent = text;
};
document.addEventListener("end", (event) => ended.add(event.target));
document.addEventListener("htmx:sse:before:connection", (event) => {
  if (ended.has(event.target)) event.preventDefault();
});
document.addEventListener("htmx:sse:after:connection", () => say("on", "Live"));
document.addEventListener("htmx:sse:error", () => say("off", "Connection lost, reconnecting"));
document.addEventListener("htmx:sse:close", (event) =>
  ended.has(event.target) ? say("over", "") : say("off", "Not live: reload the page"),
);
document.addEventListener("htmx:response:error", ({ target, detail: { ctx } }) => {
  const address = target.getAttribute("hx-sse:connect");
  if (ctx.response.status !== 429 || !address) return say("off", "Not live: reload the page");
  say("off", `Not live. ${ctx.text.replace("Try again in", "The page tries again in")}`); // names the limit
  const seconds = Number(ctx.response.headers.get("Retry-After")) || 10;
  setTimeout(() => target.isConnected && htmx.ajax("GET", address, { source: target }), seconds * 1000);
});
