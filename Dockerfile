# Router, indexer and load test in one image:  docker build -t warmroute:0.1.0 .
# Built as it stands only where a registry can be reached; its steps are tried by tests/helm/test_image.py.

FROM docker.io/library/python:3.11.14-slim-bookworm AS build
WORKDIR /src
COPY deploy/docker/constraints.txt ./
COPY pyproject.toml README.md LICENSE ./
COPY router router
COPY indexer indexer
COPY loadtest loadtest
# Into an environment of its own, which is all that the next stage takes. Compiled now: the root will be read-only.
RUN python -m venv --without-pip /opt/warmroute \
 && pip --python /opt/warmroute install --no-cache-dir --disable-pip-version-check --compile \
      --constraint constraints.txt .

FROM docker.io/library/python:3.11.14-slim-bookworm
LABEL org.opencontainers.image.title="warmroute" \
      org.opencontainers.image.description="Prefix-cache-aware router for vLLM" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/warmroute /opt/warmroute
# A number, so that runAsNonRoot can be checked; nothing in the image belongs to it.
USER 10001:10001
ENV PATH=/opt/warmroute/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp
EXPOSE 8080 9090 9091
ENTRYPOINT ["warmroute"]
CMD ["serve"]
