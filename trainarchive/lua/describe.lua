-- Add or replace descriptions of sources. A lane that is not known stays so.
-- KEYS: meta sources
-- ARGV: id and description of each source
local state = redis.call('HGET', KEYS[1], 'state')
if not state or state == 'archived' then return 0 end
for i = 1, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
return 1
