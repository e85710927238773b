// Before anything is painted: the colours that were chosen, or else those of the system.
(() => {
  "use strict";
  try {
    const chosen = localStorage.getItem("thaw-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch { /* Without storage the system decides. */ }
})();
