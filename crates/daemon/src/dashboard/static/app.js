// What all pages do: colours, times, questions before dangerous buttons, and the log as it grows.
(() => {
  "use strict";
  const LINES_MAX = 2000;

  document.getElementById("theme")?.addEventListener("click", () => {
    const root = document.documentElement;
    const next = { undefined: "dark", dark: "light", light: undefined }[root.dataset.theme];
    if (next) root.dataset.theme = next; else delete root.dataset.theme;
    try {
      if (next) localStorage.setItem("thaw-theme", next); else localStorage.removeItem("thaw-theme");
    } catch { /* It lasts as long as the page. */ }
    document.dispatchEvent(new Event("thaw:theme"));
  });

  function ago(ms) {
    const seconds = Math.max(0, Math.round((Date.now() - ms) / 1000));
    if (seconds < 60) return `${seconds} s ago`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
    if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
    return `${Math.floor(seconds / 86400)} d ago`;
  }
  function showTimes() {
    for (const time of document.querySelectorAll("time[data-ms]")) time.textContent = ago(Number(time.dataset.ms));
  }
  showTimes();
  setInterval(showTimes, 5000);
  document.addEventListener("htmx:afterSettle", showTimes);

  // Nobody looks, or somebody is about to press a button or to copy something: nothing is replaced.
  const isInUse = () => {
    const parts = [...document.querySelectorAll("#live, #more")];
    const selection = getSelection();
    return document.hidden || document.getElementById("confirm")?.open ||
      parts.some((part) => part.querySelector(":focus-visible") ||
        (!selection.isCollapsed && part.contains(selection.anchorNode)));
  };
  document.addEventListener("htmx:beforeRequest", (event) => { if (isInUse()) event.preventDefault(); });
  let scrolled = [];
  document.addEventListener("htmx:beforeSwap", (event) => {
    if (isInUse()) { event.detail.shouldSwap = false; return; }
    scrolled = [...document.querySelectorAll(":is(#live, #more) .scroll")].map((one) => one.scrollLeft);
  });
  document.addEventListener("htmx:afterSettle", () => {
    document.querySelectorAll(":is(#live, #more) .scroll").forEach((one, index) => { one.scrollLeft = scrolled[index] ?? 0; });
  });

  document.addEventListener("submit", (event) => {
    const form = event.target;
    const question = form.dataset.confirm;
    if (!question || form.dataset.confirmed) return;
    event.preventDefault();
    const dialog = document.getElementById("confirm");
    document.getElementById("confirm-text").textContent = question;
    const answer = (click) => {
      const said = click.target.dataset?.answer;
      if (!said) return;
      dialog.close();
      if (said === "yes") { form.dataset.confirmed = "1"; form.requestSubmit(); }
    };
    dialog.addEventListener("click", answer);
    dialog.addEventListener("close", () => dialog.removeEventListener("click", answer), { once: true });
    dialog.showModal();
  });

  const log = document.getElementById("log");
  if (log) {
    const tail = document.getElementById("tail");
    let source = null;
    const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    const put = (kind, text, parent) => {
      const element = document.createElement(kind === "time" ? "time" : "span");
      if (kind !== "time") element.className = kind;
      element.textContent = text;
      parent.append(element);
    };
    const add = (message) => {
      const line = JSON.parse(message.data);
      const follows = isAtEnd();
      const element = document.createElement("div");
      element.className = "line";
      element.dataset.stream = line.stream;
      put("time", line.time, element);
      put("origin", line.instance === null ? "" : `#${line.instance}`, element);
      put("text", line.text, element);
      log.append(element);
      while (log.childElementCount > LINES_MAX) log.firstElementChild.remove();
      if (follows) log.scrollTop = log.scrollHeight;
    };
    const follow = () => {
      source?.close();
      source = null;
      if (!tail.checked) return;
      source = new EventSource(log.dataset.stream);
      source.onmessage = add;
      // A refusal is not tried again and again.
      source.onerror = () => { if (source.readyState === EventSource.CLOSED) tail.checked = false; };
    };
    tail.addEventListener("change", follow);
    log.scrollTop = log.scrollHeight;
    follow();
  }
})();
