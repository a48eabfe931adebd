"""How families of models write the assistant's turn: short templates in the manner of published ones."""

_CHATML = r"""
{%- if tools %}{{ '<|im_start|>system\n<tools>' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}
{{- '\n</tools><|im_end|>\n' }}{% endif -%}
{%- for m in messages %}
  {%- if m.role == 'tool' %}
    {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
  {%- elif m.role != 'assistant' %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
  {%- else %}{{ '<|im_start|>assistant\n' }}TURN{{ '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}PROMPT{% endif -%}
"""


def _chatml(turn, prompt=""):
    return _CHATML.replace("TURN", turn.strip()).replace("PROMPT", prompt).strip()


_HERMES_CALLS = r"""
{%- for call in m.tool_calls or [] %}
  {%- if m.content or not loop.first %}{{ '\n' }}{% endif %}
  {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
  {{- call.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}
"""
_THOUGHT = "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}"
_CONTENT = "{{ m.content }}"

QWEN2_5 = _chatml(_CONTENT + _HERMES_CALLS)
QWEN3 = _chatml(_THOUGHT + _CONTENT + _HERMES_CALLS)
QWEN3_5 = _chatml(
    _THOUGHT
    + _CONTENT
    + r"""
{%- for call in m.tool_calls or [] %}
  {{- '\n\n' if loop.first and m.content else '' if loop.first else '\n' }}
  {{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
  {%- for key, value in call.function.arguments | items %}
    {{- '<parameter=' + key + '>\n' }}
    {%- set is_plain = value is string or value is not iterable %}
    {{- (value | string if is_plain else value | tojson) + '\n</parameter>\n' }}
  {%- endfor %}
  {{- '</function>\n</tool_call>' }}
{%- endfor %}
""",
    prompt=r"{{ '<think>\n' }}",
)

LLAMA_3 = r"""
{%- for m in messages %}
  {{- '<|start_header_id|>' + (m.role if m.role != 'tool' else 'ipython') + '<|end_header_id|>\n\n' }}
  {%- for tool in tools or [] if m.role == 'user' %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}
  {%- if m.tool_calls %}
    {%- if m.tool_calls | length != 1 %}{{ raise_exception('only single calls') }}{% endif %}
    {%- set call = m.tool_calls[0].function %}
    {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
  {%- else %}{{ m.content }}{% endif %}
  {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
""".strip()

_MISTRAL = r"""
{%- if tools %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
  {%- elif m.role == 'system' %}
    {%- if not loop.first %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
  {%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
  {%- else %}TURN{{ '</s>' }}
  {%- endif %}
{%- endfor %}
""".strip()

MISTRAL_V3 = _MISTRAL.replace(
    "TURN",
    r"""
{%- if m.tool_calls %}{{ '[TOOL_CALLS] [' }}
  {%- for call in m.tool_calls %}
    {%- if call.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}
    {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
    {{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
  {%- endfor %}{{ ']' }}
{%- else %}{{ m.content }}{% endif %}""",
)
MISTRAL_V11 = _MISTRAL.replace(
    "TURN",
    r"""
{%- if m.reasoning_content %}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
  {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}""",
)

_GLM = r"""[gMASK]<sop>
{%- if tools %}{{ '<|system|>\n<tools>' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}
{{- '\n</tools>' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'tool' %}{{ '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}
  {%- elif m.role != 'assistant' %}{{ '<|' + m.role + '|>\n' + m.content }}
  {%- else %}{{ '<|assistant|>' }}TURN
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}PROMPT{% endif %}"""
_GLM_CALLS = r"""
{%- for call in m.tool_calls or [] %}{{ 'NEWLINE<tool_call>' + call.function.name + 'NEWLINE' }}
  {%- for key, value in call.function.arguments | items %}
    {{- '<arg_key>' + key + '</arg_key>NEWLINE<arg_value>' }}
    {{- value if value is string else value | tojson }}
    {{- '</arg_value>NEWLINE' }}
  {%- endfor %}
  {{- '</tool_call>' }}
{%- endfor %}"""
GLM_4_5 = _GLM.replace(
    "TURN",
    r"{{ '\n<think>' + (m.reasoning_content or '') + '</think>' + ('\n' + m.content if m.content else '') }}"
    + _GLM_CALLS.replace("NEWLINE", r"\n"),
).replace("PROMPT", "")
GLM_4_7 = _GLM.replace(
    "TURN",
    r"{{ '<think>' + (m.reasoning_content or '') + '</think>' + m.content }}"
    + _GLM_CALLS.replace("NEWLINE", ""),
).replace("PROMPT", "{{ '<think>' }}")

_DEEPSEEK = r"""
{%- set ns = namespace(system='') %}
{%- for m in messages if m.role == 'system' %}{% set ns.system = ns.system + m.content + '\n' %}{% endfor %}
{{- '<｜begin▁of▁sentence｜>' + ns.system + (tools | tojson if tools else '') }}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{ '<｜User｜>' + m.content + '<｜Assistant｜>OPEN' }}
  {%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
  {%- elif m.role == 'assistant' %}TURN{{ '<｜end▁of▁sentence｜>' }}
  {%- endif %}
{%- endfor %}
""".strip()
DEEPSEEK_R1 = _DEEPSEEK.replace("OPEN", r"<think>\n").replace(
    "TURN",
    r"""{{ (m.reasoning_content or '') + '\n</think>\n\n' + m.content }}
{%- for call in m.tool_calls or [] %}
  {{- '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}
  {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}
  {{- call.function.arguments + '\n```<｜tool▁call▁end｜>' }}
  {{- '<｜tool▁calls▁end｜>' if loop.last else '' }}
{%- endfor %}""",
)
DEEPSEEK_V3_1 = _DEEPSEEK.replace("OPEN", "</think>").replace(
    "TURN",
    r"""{{ m.content }}
{%- for call in m.tool_calls or [] %}
  {{- '<｜tool▁calls▁begin｜>' if loop.first else '' }}
  {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}
  {{- '<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}
{%- endfor %}""",
)

KIMI_K2 = r"""
{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}
{%- for m in messages %}
  {{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}
  {%- if m.reasoning_content %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}
  {{- m.content }}
  {%- if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}
    {%- for call in m.tool_calls %}
      {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
      {%- set written = call.function.arguments %}
      {{- (written if written is string else written | tojson) + '<|tool_call_end|>' }}
    {%- endfor %}{{ '<|tool_calls_section_end|>' }}
  {%- endif %}
  {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
""".strip()

GPT_OSS = r"""
{%- if tools %}{{ '<|start|>developer<|message|>' }}{% for tool in tools %}{{ tool.function.name + ': ' }}
{{- tool.function.description + tool.function.parameters | tojson }}{% endfor %}{{ '<|end|>' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'tool' %}{{ '<|start|>functions.look to=assistant<|channel|>commentary<|message|>' }}
    {{- m.content + '<|end|>' }}
  {%- elif m.role != 'assistant' %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
  {%- else %}
    {%- if m.thinking %}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
    {%- endif %}
    {%- if m.tool_calls %}
      {%- set call = m.tool_calls[0].function %}
      {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
      {{- call.arguments | tojson + '<|call|>' }}
    {%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{% endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
""".strip()

FAMILIES = {
    name.lower(): value for name, value in globals().items() if name.isupper() and not name.startswith("_")
}
