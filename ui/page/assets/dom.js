// What all scripts of the page begin with.
function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// A button that is a picture: its label is read aloud, and shown to who points at it.
function button(icon, label, onclick) {
  return make("button", { type: "button", className: `glyph-${icon}`, title: label, ariaLabel: label, onclick });
}
