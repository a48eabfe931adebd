# An image of spmd-tx. By default for CPUs; for accelerators:
#
#   podman build -t spmd-tx --build-arg EXTRAS=cuda13 .    # NVIDIA GPUs; cuda12 for older drivers, tpu for Google TPUs
#
# EXTRAS is a list, as cuda13,otel,s3. The GPUs' driver comes from the host, CUDA with the packages.
ARG BASE=docker.io/library/python:3.13-slim
FROM ${BASE}
ARG EXTRAS=
ENV PATH=/opt/spmd-tx/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
# What changes least comes first: JAX with what drives the accelerator, then the other packages, then the source.
COPY constraints.txt ./
RUN python3 -m venv /opt/spmd-tx && pip install -c constraints.txt "jax${EXTRAS:+[${EXTRAS}]}"
COPY pyproject.toml README.md LICENSE ./
COPY docs/examples/rl_demo.py docs/examples/rl_demo.py
COPY spmd_tx/__init__.py spmd_tx/__init__.py
RUN pip install -c constraints.txt ".[train${EXTRAS:+,}${EXTRAS}]"
COPY spmd_tx spmd_tx
RUN pip install --no-deps --force-reinstall .
COPY launch /opt/spmd-tx/launch
RUN install -d -m 700 -o 1000 -g 1000 /data
ENV HOME=/tmp SPMD_TX_DATA_DIR=/data
VOLUME /data
WORKDIR /data
USER 1000:1000
EXPOSE 8000
ENTRYPOINT ["spmd-tx"]
CMD ["--help"]
