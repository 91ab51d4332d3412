// What a page adds that is served: it asks for news, and sends commands.
const token = new URLSearchParams(location.search).get("token");
const ASK = {stop: "Save a checkpoint and stop this run?", abort: "Stop this run now, without saving?",
  anneal: "Start the final learning-rate decay of this run now?"};
let isLooking = false, timer = null, drawn = "";

async function look() {
  clearTimeout(timer);
  if (isLooking) return;
  isLooking = true;
  let wait = 1000 * data.poll;
  try {
    const has = shown().map(number => `shown=${number}.${curves.get(number)?.version ?? -1}`);
    const answer = await fetch(`/news?${has.join("&")}`, {headers: {"X-Token": token}});
    const news = await answer.json();
    if (answer.status === 403) return alarm(news.problem);
    alarm("");
    const isNew = learn(news), key = shown().join();
    render(isNew || key !== drawn);
    drawn = key;
    if (shown().some(number => !curves.has(number))) wait = 30;
  } catch (error) { alarm("No connection to runs.py watch; trying again."); }
  isLooking = false;
  if (!document.hidden) timer = setTimeout(look, wait);
}
function alarm(text) { $("alarm").textContent = text; $("alarm").hidden = !text; }
async function send(card, command) {
  const name = runs.get(card.number).name;
  if (ASK[command] && !confirm(`${name}: ${ASK[command]}`)) return;
  card.waits = true; render(false);
  change(card.said, `${command}: waiting for the run ...`);
  try {
    const answer = await fetch("/control", {method: "POST", headers: {"Content-Type": "application/json", "X-Token": token},
      body: JSON.stringify({run: card.number, command})});
    const {answer: said, problem} = await answer.json();
    change(card.said, said || problem);
  } catch (error) { change(card.said, `${command}: no connection to runs.py watch`); }
  card.waits = false; look();
}
live = {
  changed: look,
  card(card) {
    card.said = element("div", {class: "said"});
    card.buttons = Object.entries(data.commands).map(([command, about]) => {
      const button = element("button", {title: about}, command);
      button.onclick = () => send(card, command);
      return button;
    });
    const all = element("a", {href: `/plot?run=${card.number}&token=${encodeURIComponent(token)}`, target: "_blank", rel: "noopener"}, "all curves");
    return [element("div", {class: "buttons"}, ...card.buttons, all), card.said];
  },
  update(card, run) { for (const button of card.buttons) button.disabled = run.state !== "running" || card.waits === true; },
};
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
