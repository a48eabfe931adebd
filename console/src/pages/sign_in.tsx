// Asks for an API key, where the server wants one.
import { useState } from "preact/hooks";
import { signIn } from "../api";
import { Problem } from "../parts";

export function SignIn() {
  const [key, setKey] = useState("");
  const [error, setError] = useState<string | null>(null);
  const submit = async (event: Event) => {
    event.preventDefault();
    try {
      await signIn(key.trim());
    } catch (refused) {
      setError((refused as Error).message);
    }
  };
  return (
    <form class="sign-in" onSubmit={submit}>
      <h1>Sign in</h1>
      <label>
        API key{" "}
        <input
          type="password"
          autocomplete="off"
          required
          value={key}
          onInput={(event) => setKey(event.currentTarget.value)}
        />
      </label>
      <Problem text={error} />
      <button type="submit">Sign in</button>
      <p class="empty">
        The operator makes keys with <code>spmd-tx keys create</code>.
      </p>
    </form>
  );
}
