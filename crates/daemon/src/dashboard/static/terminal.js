// The terminal of a sandbox. xterm.js makes style elements; the page's policy takes those that carry its nonce.
(() => {
  "use strict";
  const { nonce } = document.currentScript;
  const make = document.createElement.bind(document);
  document.createElement = (name, ...rest) => {
    const element = make(name, ...rest);
    if (String(name).toLowerCase() === "style") element.nonce = nonce;
    return element;
  };

  const place = document.getElementById("terminal");
  const state = document.getElementById("terminal-state");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const theme = () => ({
    background: colour("--terminal"), foreground: colour("--terminal-text"), cursor: colour("--accent"),
    selectionBackground: colour("--accent") + "55",
  });
  const terminal = new Terminal({
    fontFamily: "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace", fontSize: 13, cursorBlink: true,
    scrollback: 5000, theme: theme(), screenReaderMode: false, allowProposedApi: false,
  });
  const fit = new FitAddon.FitAddon();
  terminal.loadAddon(fit);
  terminal.open(place);
  fit.fit();
  document.addEventListener("thaw:theme", () => { terminal.options.theme = theme(); });

  const scheme = location.protocol === "https:" ? "wss:" : "ws:";
  const query = `rows=${terminal.rows}&columns=${terminal.cols}`;
  const socket = new WebSocket(`${scheme}//${location.host}${place.dataset.stream}?${query}`);
  socket.binaryType = "arraybuffer";
  const encoder = new TextEncoder();
  const PIECE = 16384;
  const send = (bytes) => {
    if (socket.readyState !== WebSocket.OPEN) return;
    for (let at = 0; at < bytes.length; at += PIECE) socket.send(bytes.subarray(at, at + PIECE));
  };
  socket.onopen = () => { state.textContent = "Connected"; state.dataset.state = "open"; terminal.focus(); };
  socket.onmessage = (message) => terminal.write(new Uint8Array(message.data));
  socket.onclose = (event) => {
    state.textContent = event.reason ? `Ended: ${event.reason}` : "The connection was not made, or was lost.";
    state.dataset.state = "closed";
    terminal.options.disableStdin = true;
  };
  terminal.onData((text) => send(encoder.encode(text)));
  terminal.onBinary((text) => send(Uint8Array.from(text, (letter) => letter.charCodeAt(0))));
  terminal.onResize(({ rows, cols }) => {
    if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ rows, columns: cols }));
  });
  new ResizeObserver(() => fit.fit()).observe(place);
})();
