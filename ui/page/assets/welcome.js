// An empty thread: what can be asked, and three questions to click on.
const { heading, questions } = props.value;
const title = document.createElement("h2");
title.textContent = heading;
const list = document.createElement("ul");
questions.forEach((question, number) => {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = question;
  button.addEventListener("click", () => trigger("ask", { number }));
  const item = document.createElement("li");
  item.append(button);
  list.append(item);
});
element.querySelector("section").setAttribute("aria-label", "Suggestions");
element.querySelector("section").append(title, list);
