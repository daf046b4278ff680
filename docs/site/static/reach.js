// What scrolls must be reachable by keyboard, and a heading must say its level: furo says neither.
addEventListener('DOMContentLoaded', () => {
  for (const block of document.querySelectorAll('pre, .table-wrapper')) block.tabIndex = 0
  for (const one of document.querySelectorAll('[role=heading]')) one.ariaLevel = '2'
})
