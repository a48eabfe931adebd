// Dark or light: as the system wants it, until the reader chooses.
import { computed, effect, signal } from "@preact/signals";

const dark = matchMedia("(prefers-color-scheme: dark)");
const system = signal(dark.matches);
dark.addEventListener("change", () => (system.value = dark.matches));

export const choice = signal<"dark" | "light" | null>(stored());
export const theme = computed(() => choice.value ?? (system.value ? "dark" : "light"));

function stored(): "dark" | "light" | null {
  const text = localStorage.getItem("theme");
  return text === "dark" || text === "light" ? text : null;
}

export function toggleTheme(): void {
  choice.value = theme.value === "dark" ? "light" : "dark";
  localStorage.setItem("theme", choice.value);
}

effect(() => {
  document.documentElement.dataset.theme = theme.value;
});
