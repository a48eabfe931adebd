"""Chat templates in the manner of published models."""

QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\nSignatures of functions are within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(is_looking=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.is_looking and message.role == "user" and message.content is string %}
        {%- set ns.is_looking = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function or tool_call %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA3 = r"""
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday: " + date_string + "\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'ipython' or message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" + message.content | tojson + "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model takes one tool call at once") }}
        {%- endif %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- message.tool_calls[0].function.arguments | tojson + "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""

PLAIN = """\
{% for document in documents or [] %}[{{ document.title }}] {{ document.text }}
{% endfor %}
{% for message in messages %}
{{ message.role }}: {% generation %}{{ message.content }}{% endgeneration %}{{ eos_token }}
{% endfor %}
{{ dict(a=1) }}{{ 'assistant:' if add_generation_prompt }}"""


def with_calls(calls: str, content: str = "{{ message.content }}", roles: str = "true") -> str:
    """A template that writes messages and, in a way of its own, the tool calls of messages."""
    message = f"<{{{{ message.role }}}}>{content}"
    for_calls = "{% for call in message.tool_calls or [] %}" + calls + "{% endfor %}"
    return (
        "{% for message in messages %}{% if "
        + roles
        + " %}"
        + message
        + for_calls
        + "{% endif %}{% endfor %}"
    )


# How published models write the arguments of a call.
AS_ITEMS = with_calls(
    "[{{ call.function.name }}{% for key, value in call.function.arguments | items %} {{ key }}="
    "{{ value if value is string else value | tojson }}{% endfor %}]"
)
AS_JSON = with_calls("{{ call.function | tojson }}")
AS_EITHER = with_calls(
    "{{ call.function.name }}{{ call.function.arguments if call.function.arguments is string "
    "else call.function.arguments | tojson }}"
)
AS_STRINGS = with_calls("{{ call.function.name + '\\n' + call.function.arguments + '\\n' }}")
AS_THEY_COME = with_calls("{{ call.function.name }}({{ call.function.arguments }})")
MAPPINGS_ONLY = with_calls(
    "{% if call.function.arguments is not mapping %}{{ raise_exception('send a mapping') }}{% endif %}"
    "{{ call.function.name }}{{ call.function.arguments | dictsort }}"
)
# What they leave out.
FIRST_CALL = AS_JSON.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]")
CALL_OR_CONTENT = with_calls(
    "{{ call.function | tojson }}", "{% if not message.tool_calls %}{{ message.content }}{% endif %}"
)
FOUR_ROLES = with_calls(
    "{{ call.function | tojson }}", roles="message.role in ['system', 'user', 'assistant', 'tool']"
)
LATEST_REASONING = with_calls(
    "{{ call.function | tojson }}",
    "{% if loop.last and message.reasoning_content %}({{ message.reasoning_content }}){% endif %}"
    "{{ message.content }}",
)
