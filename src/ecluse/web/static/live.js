// Says beside the heading whether the page is kept up to date, and lets a stream go whose last word was "end".
const ended = new WeakSet();
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
document.addEventListener("htmx:sse:error", () => say("off", "Connection lost, trying again"));
document.addEventListener("htmx:sse:close", (event) =>
  ended.has(event.target) ? say("over", "") : say("off", "Not live: reload the page"),
);
document.addEventListener("htmx:response:error", () => say("off", "Not live: reload the page"));
