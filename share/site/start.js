// Starts the page, or shows why it cannot start.

const notice = document.getElementById("notice");
const tell = (text) => { notice.textContent = text; notice.hidden = false; };
addEventListener("unhandledrejection", ({ reason }) => tell(`Error: ${reason?.message ?? reason}`));
if (location.protocol === "file:") {
  tell("This page only works from a web server. Run python -m http.server --directory FOLDER 8000, "
    + "with the folder of this file as FOLDER. Then open http://localhost:8000.");
} else {
  import("./page.js");
}
