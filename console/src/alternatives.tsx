// What else might have stood in the place of a token, as the weights that have drawn it say.
import { nats, probability, type Alternative } from "./logic/logprobs";
import { Head } from "./parts";

const NUMBERS = ["Log-prob.", "Probability"];

export function Alternatives({ drawn, known }: { drawn: string; known: Alternative[] }) {
  if (!known.length) return <p class="note">Nothing stands before this token, so that no probability is known.</p>;
  return (
    <div class="alternatives" role="status">
      <table class="rows">
        <caption class="note">
          In the place of <code>{shown(drawn)}</code>, at temperature 1
        </caption>
        <Head names={["Token", ...NUMBERS]} numbers={NUMBERS} />
        <tbody>
          {known.map(({ text, logprob }) => (
            <tr key={text} class={text === drawn ? "drawn" : undefined}>
              <th scope="row">
                <code>{shown(text)}</code>
                {text === drawn && <small>drawn</small>}
              </th>
              <td class="number">{nats(logprob)}</td>
              <td class="number">{probability(logprob)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** A token with its spaces and line ends as they are written in programs. */
function shown(text: string): string {
  return JSON.stringify(text).slice(1, -1).replaceAll(" ", "\u00b7");
}
