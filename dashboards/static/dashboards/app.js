/* Comfort for polling pages. Everything works without this file. */
(function () {
  "use strict";

  // Do not poll for a page that nobody looks at.
  document.addEventListener("htmx:beforeRequest", function (event) {
    if (document.hidden && event.detail.requestConfig.triggeringEvent === undefined) {
      event.preventDefault();
    }
  });

  // Never swap a button away under a pressed pointer, nor a field under a typing hand.
  document.addEventListener("htmx:beforeSwap", function (event) {
    var target = event.detail.target;
    if (target.querySelector("button:active, a:active, input:focus, select:focus, textarea:focus") &&
        event.detail.requestConfig.verb === "get") {
      event.detail.shouldSwap = false;
    }
  });

  // What the reader opened or scrolled stays so across a swap.
  var opened = {}, scrolled = {};
  document.addEventListener("htmx:beforeSwap", function (event) {
    event.detail.target.querySelectorAll("details[id]").forEach(function (item) { opened[item.id] = item.open; });
    event.detail.target.querySelectorAll("[data-keep-scroll]").forEach(function (item) {
      var atEnd = item.scrollHeight - item.scrollTop - item.clientHeight < 24;
      scrolled[item.id] = atEnd ? -1 : item.scrollTop;
    });
  });
  document.addEventListener("htmx:afterSwap", function () {
    Object.keys(opened).forEach(function (id) {
      var item = document.getElementById(id);
      if (item) { item.open = opened[id]; }
    });
    Object.keys(scrolled).forEach(function (id) {
      var item = document.getElementById(id);
      if (item) { item.scrollTop = scrolled[id] < 0 ? item.scrollHeight : scrolled[id]; }
    });
    opened = {};
    scrolled = {};
  });

  // A live log starts at its end.
  document.querySelectorAll("[data-keep-scroll=end]").forEach(function (item) { item.scrollTop = item.scrollHeight; });
})();
