// An empty thread: what can be asked, and three questions to click on.
const { heading, questions } = props.value;
const items = questions.map((question, number) =>
  make("li", {}, make("button", { type: "button", onclick: () => trigger("ask", { number }) }, question)),
);
element.querySelector("section").append(make("h2", {}, heading), make("ul", {}, ...items));
