/* Apply the theme before the first paint, so that the page does not flash. Without a choice the system's theme applies. */

(() => {
  const NAME = "relaxserve.theme", THEMES = ["system", "light", "dark"];
  const root = document.documentElement;
  let theme = "system";
  try {
    theme = JSON.parse(localStorage.getItem(NAME)) ?? theme;
  } catch {
    // storage is forbidden, or its content is invalid
  }
  root.dataset.theme = THEMES.includes(theme) ? theme : "system";

  document.addEventListener("click", event => {
    if (!event.target.closest("[data-action=theme]")) return;
    root.dataset.theme = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
    try {
      localStorage.setItem(NAME, JSON.stringify(root.dataset.theme));
    } catch {
      // storage is forbidden, so the theme lasts as long as the page
    }
  });
})();
