#!/usr/bin/env bash
# make_secrets.sh [DIR]: makes each missing secret of infra/compose.yaml as a random file in infra/secrets, which git
# ignores. Nobody chooses a password and none has a default; a file that is there stays. Only the owner may enter the
# folder; the files are readable in it, since each container has a user of its own and sees only those it is given.
set -euo pipefail
umask 022
folder=${1:-$(dirname "$0")/../secrets}
mkdir -p "$folder"
chmod 700 "$folder"
cd "$folder"

draw() { head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n'; }
# Writes standard input to a file that is not there yet; an interruption leaves no half of one.
make() {
  cat >".$1.partial"
  chmod 444 ".$1.partial"
  mv ".$1.partial" "$1"
  echo "made $folder/$1"
}

for name in postgres_password prefect_database_password mlflow_database_password mlflow_admin_password mlflow_worker_password \
  mlflow_secret_key vllm_api_key; do
  [ -e "$name" ] || draw | make "$name"
done
[ -e prefect_auth ] || echo "turnwise:$(draw)" | make prefect_auth

# The S3 server's identities and the two files of credentials that boto3 reads belong together: all three or none.
if ! [ -e s3_identities.json ] || ! [ -e s3_credentials ] || ! [ -e s3_admin_credentials ]; then
  rm -f s3_identities.json s3_credentials s3_admin_credentials
  bucket=${S3_BUCKET:-turnwise}
  admin_secret=$(draw)
  secret=$(draw)
  make s3_admin_credentials <<END
[default]
aws_access_key_id = turnwise-admin
aws_secret_access_key = $admin_secret
END
  make s3_credentials <<END
[default]
aws_access_key_id = turnwise
aws_secret_access_key = $secret
END
  make s3_identities.json <<END
{
  "identities": [
    {
      "name": "admin",
      "credentials": [{"accessKey": "turnwise-admin", "secretKey": "$admin_secret"}],
      "actions": ["Admin", "Read", "Write", "List", "Tagging"]
    },
    {
      "name": "turnwise",
      "credentials": [{"accessKey": "turnwise", "secretKey": "$secret"}],
      "actions": ["Read:$bucket", "Write:$bucket", "List:$bucket", "Tagging:$bucket"]
    }
  ]
}
END
fi
