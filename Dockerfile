# An image of spmd-tx. By default for CPUs; for accelerators:
#
#   podman build -t spmd-tx --build-arg EXTRAS=cuda13 .    # NVIDIA GPUs; cuda12 for older drivers, tpu for Google TPUs
#
# EXTRAS is a list, as cuda13,otel,s3. The GPUs' driver comes from the host, CUDA with the packages.
ARG BASE=docker.io/library/python:3.13-slim
FROM ${BASE} AS build
ARG EXTRAS=
WORKDIR /source
RUN python3 -m venv /opt/spmd-tx
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The packages change less often than the source, so they are a layer of their own.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY docs/examples/rl_demo.py docs/examples/rl_demo.py
COPY spmd_tx/__init__.py spmd_tx/__init__.py
RUN /opt/spmd-tx/bin/pip install -c constraints.txt ".[train${EXTRAS:+,}${EXTRAS}]"
COPY spmd_tx spmd_tx
RUN /opt/spmd-tx/bin/pip install --no-deps --force-reinstall . && /opt/spmd-tx/bin/python -m compileall -q /opt/spmd-tx

FROM ${BASE}
COPY --from=build /opt/spmd-tx /opt/spmd-tx
COPY launch /opt/spmd-tx/launch
ENV PATH=/opt/spmd-tx/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp SPMD_TX_DATA_DIR=/data
RUN install -d -m 700 -o 1000 -g 1000 /data
VOLUME /data
WORKDIR /data
USER 1000:1000
EXPOSE 8000
ENTRYPOINT ["spmd-tx"]
CMD ["--help"]
